"""The table of promises itself: what is counted comes out, and what is wrong fails."""

import pytest

from tests.support.promises.page import PAGE, ROOT, marked, with_section
from tests.support.promises.tally import PROMISES

pytest_plugins = ("pytester",)


def test_a_test_that_saw_a_wrong_byte_fails_and_the_table_says_so(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "from tests.support.promises.tally import pytest_collection_modifyitems, pytest_configure, pytest_terminal_summary, tally"
    )
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.promise("space", "leases")
        def test_one(tally, subtests):
            with subtests.test("a part of it"):
                tally.add(scenarios=3, faults=2)

        @pytest.mark.promise("space")
        def test_two(tally):
            tally.add(scenarios=1, wrong=1)

        @pytest.mark.promise("load")
        def test_three():
            pass

        @pytest.mark.promise("access")
        def test_nothing(tally):
            pass

        @pytest.mark.promise("access")
        @pytest.mark.skip
        def test_elsewhere(tally):
            pass
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=4, errors=2, skipped=1)
    rows = {
        line.split()[0]: line.split()[1:]
        for line in result.outlines
        if line.split()[:1] and line.split()[0] in {*PROMISES, "all"}
    }
    assert rows["space"] == ["2", "1", "0", "4", "2", "0", "0", "1", "0", "0", "0"]
    assert rows["leases"] == ["1", "0", "0", "3", "2", "0", "0", "0", "0", "0", "0"]
    assert rows["access"] == ["1", "1", "1", "0", "0", "0", "0", "0", "0", "0", "0"]
    assert rows["load"] == ["1", "0", "0", "1", "0", "0", "0", "0", "0", "0", "0"]
    assert rows["all"] == ["4", "2", "1", "5", "2", "0", "0", "1", "0", "0", "0"]


def test_the_page_names_every_promise_with_the_tests_that_show_it() -> None:
    page = PAGE.read_text()
    assert page == with_section(page), "run: python -m tests.support.promises.page"


@pytest.mark.parametrize("promise", PROMISES)
def test_every_promise_has_tests(promise: str) -> None:
    assert [path for path in (ROOT / "tests").rglob("test_*.py") if promise in marked(path)]
