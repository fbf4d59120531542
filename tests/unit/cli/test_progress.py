"""Bars and lines of progress: their figures are true, and they fit the terminal."""

import io
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import pytest
from rich.console import Console

from bdn.cli import output
from bdn.cli.output import Output, _figures, bar_on, progress_bar, progress_bars
from bdn.net.waiting import last_mirror, last_stage
from bdn.wire.mirror_schema import Mirror
from bdn.wire.progress import Progress
from bdn.wire.stage_schema import BytesFrom, StageDocument, StageMount

GB = 10**9
LINES = Output(as_json=False, quiet=False)


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
    with progress_bar(LINES, "staging") as show:
        for _ in range(3):
            show(5, 5, 0)
    assert capsys.readouterr().err == "staging: 5 B of 5 B\n"


_Update = TypeVar("_Update")
NOW = datetime(2026, 11, 25, tzinfo=UTC)


async def all_of(updates: Sequence[_Update]) -> AsyncIterator[_Update]:
    for update in updates:
        yield update


def mirror(transferred: int, under_way: int, reused: int = 0) -> Mirror:
    return Mirror(
        id="mir_1", status="SYNCING", created_at=NOW, sources=[], bytes_total=100,
        bytes_transferred=transferred, bytes_under_way=under_way, bytes_reused=reused,
    )  # fmt: skip


def stage(mirrored: int, under_way: int) -> StageDocument:
    mount = StageMount(
        mount_location="/m", manifest="b3:", source="hf://o/r", path="/p", bytes_total=100,
        bytes_done=mirrored, bytes_under_way=under_way, bytes_from=BytesFrom(mirror=mirrored),
    )  # fmt: skip
    return StageDocument(id="stg_1", job_id="j", state="STAGING", created_at=NOW, mounts=[mount])


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """How much was done, line by line; every update is a line."""
    monkeypatch.setattr(output, "_LINE_SECONDS", 0.0)
    return lambda: [line.partition(": ")[2].partition(",")[0] for line in capsys.readouterr().err.splitlines()]


async def test_what_is_under_way_is_shown_with_what_is_done(said: Callable[[], list[str]]) -> None:
    shown = ["7 B of 100 B", "90 B of 100 B", "100 B of 100 B"]
    with progress_bars(LINES) as report:
        await last_mirror(all_of([mirror(0, 7), mirror(40, 30, 20), mirror(80, 0, 20)]), report)
        assert said() == shown
        await last_stage(all_of([stage(0, 7), stage(40, 50), stage(100, 0)]), report)
        assert said() == shown


async def test_a_bar_stands_still_while_bytes_come_again_and_ends_at_the_total(
    said: Callable[[], list[str]],
) -> None:
    """A chunk was lost; another replica answered; a file came wrong, and once more."""
    updates = [mirror(40, 30), mirror(40, 0), mirror(40, 50), mirror(90, 20), mirror(90, 20)]
    with progress_bars(LINES) as report:
        await last_mirror(all_of(updates), report)
    assert said() == ["70 B of 100 B", "70 B of 100 B", "90 B of 100 B", "100 B of 100 B"]


def test_the_rate_counts_from_the_begin_of_a_step_and_not_from_its_first_update(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 10.0, 10.0, 30.0])  # begin; the mirror's update and end; the stage's update
    monkeypatch.setattr("bdn.cli.output.time.monotonic", lambda: next(now, 30.0))
    with progress_bars(LINES) as report:
        report(Progress("mirroring", 100, 100, 100, 1, is_last=True))
        report(Progress("staging", 100, 100, 100, 1, is_last=True))
    assert capsys.readouterr().err.splitlines() == [
        "mirroring: 100 B of 100 B, 10 B/s",
        "staging: 100 B of 100 B, 5 B/s",
    ]


def test_an_empty_selection_prints_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(LINES, "mirroring") as show:
        show(0, 0, 0)
    assert capsys.readouterr().err == ""
