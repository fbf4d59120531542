"""What ``make setup`` installs: what runs, and nothing that only tests need and that not every Python and processor has."""

import re
import tomllib
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[3]
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOR_BUILDS: Final = {line.strip() for line in (ROOT / "requirements/build.in").read_text().splitlines()}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=]", one)[0] for one in requirements}


def locked(lock: str) -> dict[str, str]:
    """The versions by name."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / f"requirements/{lock}.txt").read_text(), re.MULTILINE))


@pytest.mark.parametrize(("lock", "extras"), [("runtime", set()), ("setup", {"demo", "traces"})])
def test_lock_of_what_runs__has_its_extras__and_nothing_of_tests(lock: str, extras: set[str]) -> None:
    optional = PROJECT["project"]["optional-dependencies"]
    wanted = names(PROJECT["project"]["dependencies"]).union(*(names(optional[extra]) for extra in extras))
    of_tests = names(PROJECT["dependency-groups"]["dev"]) - wanted - FOR_BUILDS

    assert wanted <= locked(lock).keys()
    # These are libraries that moto needs, too.
    assert of_tests & locked(lock).keys() <= {"google-crc32c", "jsonschema", "pyyaml"}
    assert extras == optional.keys() or not names(optional["demo"]) & locked(lock).keys()


def test_locks__agree_on_versions() -> None:
    """The tests run what ``make setup`` installs and what the image holds."""
    setup, tests = locked("setup"), locked("dev")
    assert {name: version for name, version in setup.items() if tests.get(name, version) != version} == {}
    assert locked("runtime").items() <= setup.items()


def test_make_setup__installs_the_lock_of_what_runs__and_targets_that_test_install_their_own() -> None:
    makefile = (ROOT / "Makefile").read_text()
    needs = dict(re.findall(r"^([a-z.][\w./-]*): (.*)$", makefile, re.MULTILINE))

    assert "requirements/setup.txt" in needs[".venv/.ready"].split()
    assert {"requirements/dev.txt", ".venv/.ready"} <= set(needs[".venv/.tools"].split())
    for target in ("test", "quick", "fault", "mutants", "training", "lint", "check", "bench"):
        assert ".venv/.tools" in needs[target].split(), target
    assert needs["demo"] == "setup"
