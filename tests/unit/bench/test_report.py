"""What a benchmark tells when something is slow, is absent or breaks."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import __main__ as program
from bench import peers_fill, report
from bench.nginx import Origin
from bench.peers import Peer
from bench.report import Figure, Missing, Row


@pytest.mark.parametrize(("asked", "values", "is_missed"), [
    (">= 0.90", (0.1, 0.9, 2.0), False), (">= 0.90", (0.1, 0.8, 2.0), True), ("<= 10", (10.0,), False),
    ("<= 10", (10.1,), True), ("< 0.10 s", (0.1,), True), ("", (1.0,), False),
])  # fmt: skip
def test_a_median_that_is_not_what_was_asked_for_is_marked(
    asked: str, values: tuple[float, ...], is_missed: bool
) -> None:
    figure = Figure("it", "x", values, asked)
    assert (figure.is_missed, "**missed**" in figure.row()) == (is_missed, is_missed)


def test_the_figures_of_a_section_are_replaced_where_they_stand_and_its_words_stay(page: Path) -> None:
    for value in (1.0, 2.0):
        for name in ("two", "one"):
            report.write(name, [Figure(f"{name} thing", "s", (value,))], 1)
    told = [line for line in page.read_text().splitlines() if line and not line.startswith(("Measured", "|-"))]
    head = "| what | median | range | runs | unit | asked for |"
    assert told == [
        *("# Benchmarks", "## one", "Measures one.", head, "| one thing | 2 | 2 - 2 | 1 | s |  |"),
        *("## two", "Measures two.", head, "| two thing | 2 | 2 - 2 | 1 | s |  |"),
    ]


def test_what_was_tried_at_a_smaller_scale_does_not_change_the_page(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "SCALE", 0.1)
    before = page.read_text()
    assert "at the scale 0.1" in report.write("one", [], 1)
    assert page.read_text() == before


def test_a_section_that_fails_is_a_row_and_the_others_go_on(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Sequence[Row]:
        raise AssertionError("the server did not start")

    fine = [Figure("it", "s", (1.0,), "<= 2")]
    monkeypatch.setattr(program, "BENCHMARKS", {"one": broken, "two": lambda: fine})
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 1
    failed = "| one | failed: AssertionError: the server did not start | | 0 | |  |"
    assert failed in page.read_text()
    assert capsys.readouterr().out.splitlines()[-2:] == [f"| one {failed}", "| two | it | 1 | 1 - 1 | 1 | s | <= 2 |"]


@pytest.mark.parametrize("names", [[], ["two"]])
def test_what_could_not_be_installed_is_no_failure(
    names: list[str], page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = [Missing("it", "fio is not installed", ">= 1")]
    monkeypatch.setattr(program, "BENCHMARKS", {"two": lambda: absent})
    monkeypatch.setattr(sys, "argv", ["benchmarks", *names])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert not ended.value.code
    assert "| it | not measured: fio is not installed | | 0 | | >= 1 |" in page.read_text()


def test_the_page_has_a_section_for_each_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SCALE", 0.1)
    for name in program.BENCHMARKS:
        assert f"python -m bench {name}`" in report.write(name, [], 1)


def test_a_peer_that_breaks_is_a_row_and_is_not_asked_again(tmp_path: Path) -> None:
    asked: list[Path] = []

    def run(_: object, prefix: str, target: Path) -> None:
        asked.append(target)
        raise AssertionError("exit status 7")

    beside = peers_fill.Beside(Peer("other", "sh", run), ">= 3")
    for number in range(2):
        beside.run(_offer(tmp_path), number)
    assert beside.rows([1.0, 1.0]) == [Missing("other", "exit status 7", ">= 3", has_failed=True)]
    assert [path.exists() for path in asked] == [False]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    page = tmp_path / "benchmarks.md"
    sections = [f"## {name}\n\nMeasures {name}.\n\nNot measured yet.\n" for name in ("one", "two")]
    page.write_text("\n".join(["# Benchmarks\n", *sections]))
    monkeypatch.setattr(report, "PAGE", page)
    monkeypatch.setattr(report, "SCALE", 1.0)
    return page


def _offer(root: Path) -> peers_fill.Offer:
    """Of something that nobody reads."""
    return peers_fill.Offer(Origin("", root), "", 1.0, root, lambda: None, lambda _, __: None)
