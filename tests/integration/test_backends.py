"""Which tests run on which backend, and that what cannot run on production says why."""

import pytest

from tests.support.mirror import backends

pytest_plugins = ("pytester",)
TESTS = """
import pytest

@pytest.fixture
def mirror(backend):
    return backend

def test_of_a_mirror(mirror): pass

@pytest.mark.production
def test_of_its_store(mirror): pass

@pytest.mark.embedded("it locks SQLite")
def test_of_a_file(mirror): pass

def test_of_something_else(): pass
"""
EMBEDDED = ["test_of_a_mirror", "test_of_its_store", "test_of_a_file"]
PRODUCTION = ["test_of_a_mirror[production]", "test_of_its_store[production]", "test_of_a_file[production]"]


@pytest.mark.parametrize(
    ("is_full", "only", "expected"),
    [
        (False, None, [*EMBEDDED, PRODUCTION[1]]),
        (True, None, [*EMBEDDED, *PRODUCTION]),
        (False, "production", PRODUCTION),
        (False, "embedded", EMBEDDED),
    ],
)
def test_a_test_of_a_mirror_runs_on_the_backends_that_are_asked_for(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, is_full: bool, only: str | None, expected: list[str]
) -> None:
    monkeypatch.setattr(backends, "FULL", is_full)
    monkeypatch.setattr(backends, "ONLY", only)
    path = pytester.makepyfile(TESTS)
    found = pytester.runpytest_inprocess("-p", backends.__name__, "--collect-only", "-q")
    ids = [line.removeprefix(f"{path.name}::") for line in found.outlines if "::" in line]
    assert sorted(ids) == sorted([*expected, "test_of_something_else"])


def test_what_is_of_the_embedded_backend_alone_is_skipped_on_production_with_its_reason(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "FULL", True)
    pytester.makepyfile(TESTS)
    found = pytester.runpytest_inprocess("-p", backends.__name__, "-m", "embedded", "-rs")
    found.assert_outcomes(passed=1, skipped=1, deselected=5)
    found.stdout.fnmatch_lines("SKIPPED * on production: it locks SQLite")
