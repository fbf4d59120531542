"""Bars and lines of progress: their figures are true, and they fit the terminal."""

import io

import pytest
from rich.console import Console

from bdn.cli.output import Output, _figures, bar_on, progress_bar

GB = 10**9


@pytest.mark.parametrize("width", [50, 80, 200])
def test_a_bar_fits_the_terminal_and_says_how_much_is_done(width: int) -> None:
    text = io.StringIO()
    console = Console(file=text, width=width, height=5, force_terminal=True, color_system=None, legacy_windows=False)
    with bar_on(console, "mirroring", began=-100.0) as show:
        show(123_400_000_000, 999 * GB, 100 * GB)

    lines = [line for line in text.getvalue().replace("\r", "\n").split("\n") if "mirroring" in line]
    shown = [line.replace("\x1b[2K", "").replace("\x1b[?25l", "") for line in lines]
    assert shown
    assert all(len(line.rstrip()) <= width for line in shown), shown
    assert "123 GB of 999 GB" in shown[-1]
    assert ("left" in shown[-1]) == (width >= 80)
    assert "━" in shown[-1]  # some of the bar is left


@pytest.mark.parametrize(("done", "total", "moved", "told"), [
    (0, None, 0, "0 B"),
    (16 * GB, 16 * GB, 0, "16 GB of 16 GB"),  # all of it was here
    (8 * GB, 16 * GB, 4 * GB, "8 GB of 16 GB, 1 GB/s, 8s left"),
    (16 * GB, 16 * GB, 4 * GB, "16 GB of 16 GB, 1 GB/s"),
])  # fmt: skip
def test_only_bytes_that_moved_have_a_rate(done: int, total: int | None, moved: int, told: str) -> None:
    assert ", ".join(_figures(done, total, moved, 4.0)) == told


def test_a_line_tells_the_end_once(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(Output(as_json=False, quiet=False), "staging") as show:
        for _ in range(3):
            show(5, 5, 0)
    assert capsys.readouterr().err == "staging: 5 B of 5 B\n"
