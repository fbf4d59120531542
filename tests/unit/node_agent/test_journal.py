"""The journal: what was recorded is there after a kill, in its order, once; what is half takes nothing with it."""

import errno
import os
from pathlib import Path

import pytest

import node_agent.journal
from bdn.core.events import Event
from node_agent.journal import Journal
from tests.support.crash.scripted_writes import failing

MANIFEST = f"b3:{'1' * 64}"


def dropped(why: object) -> Event:
    return Event.of("dropped", {"why": str(why)}, manifest=MANIFEST)


class Opened(Journal):
    """A journal that counts what it could not write."""

    def __init__(self, folder: Path, **given: int) -> None:
        self.lost = 0
        super().__init__(folder, lambda: 1.0, self._count, **given)
        self.open()

    def _count(self, events: int) -> None:
        self.lost += events


def whys(journal: Journal) -> list[str]:
    """What stands in it, oldest first."""
    return [str(event.facts["why"]) for event in journal.events()][::-1]


def told(journal: Journal) -> list[str]:
    return [str(event.facts["why"]) for event in journal.unreported()]


def test_what_was_recorded_is_there_for_whoever_comes_next(tmp_path: Path) -> None:
    first = Opened(tmp_path / "journal")
    first.record([dropped(1), dropped(2)])
    first.record([])
    first.record([dropped(3)])

    second = Opened(tmp_path / "journal")  # the first was killed: nothing was closed
    second.record([dropped(4)])

    assert whys(second) == ["1", "2", "3", "4"]
    assert len({event.id for event in second.events()}) == 4
    assert told(second) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("cut", range(2, 60, 7))
def test_a_line_that_was_cut_takes_no_other_with_it(tmp_path: Path, cut: int) -> None:
    first = Opened(tmp_path)
    first.record([dropped(1)])
    first.record([dropped(2)])
    page = tmp_path / "journal.jsonl"
    os.truncate(page, page.stat().st_size - cut)

    second = Opened(tmp_path)
    second.record([dropped(3)])

    assert whys(second) == ["1", "3"]
    assert told(Opened(tmp_path)) == ["1", "3"]


def test_rubbish_in_the_middle_is_passed_over(tmp_path: Path) -> None:
    first = Opened(tmp_path)
    first.record([dropped(1), dropped(2), dropped(3)])
    page = tmp_path / "journal.jsonl"
    lines = page.read_bytes().splitlines(keepends=True)
    page.write_bytes(lines[0] + bytes(len(lines[1])) + b"\n" + lines[2])

    assert whys(Opened(tmp_path)) == ["1", "3"]


def test_the_oldest_page_goes(tmp_path: Path) -> None:
    journal = Opened(tmp_path, page_size=2000)
    for number in range(100):
        journal.record([dropped(number)])

    kept = whys(journal)
    assert kept == [str(number) for number in range(100 - len(kept), 100)]
    assert 5 < len(kept) < 40
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4500
    assert whys(Opened(tmp_path)) == kept


def test_what_was_told_is_not_told_again_and_the_rest_waits(tmp_path: Path) -> None:
    first = Opened(tmp_path)
    first.record([dropped(number) for number in range(700)])
    batch = first.unreported()
    assert [event.facts["why"] for event in batch] == [str(number) for number in range(500)]
    assert first.unreported() == batch  # nobody said that it was heard
    first.mark_reported(batch)
    assert told(first) == [str(number) for number in range(500, 700)]

    second = Opened(tmp_path)
    assert told(second) == [str(number) for number in range(500, 700)]
    second.mark_reported(second.unreported())
    assert (second.waiting, Opened(tmp_path).waiting) == (0, 0)


def test_a_new_event_is_told_although_its_like_was_lost_after_it_was_told(tmp_path: Path) -> None:
    """A power cut takes the last lines, which the mirror has heard already."""
    first = Opened(tmp_path)
    first.record([dropped(1), dropped(2)])
    first.mark_reported(first.unreported())
    (tmp_path / "journal.jsonl").unlink()

    second = Opened(tmp_path)
    second.record([dropped(3)])

    assert told(second) == ["3"]
    assert told(Opened(tmp_path)) == ["3"]


def test_more_than_may_wait_stays_in_the_journal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent.journal, "_WAITING", 3)
    journal = Opened(tmp_path)
    journal.record([dropped(number) for number in range(5)])

    assert told(journal) == told(Opened(tmp_path)) == ["2", "3", "4"]
    assert len(whys(journal)) == 5


def test_a_full_disk_loses_lines_and_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Opened(tmp_path)
    journal.record([dropped(1)])
    real = os.write

    def half(descriptor: int, content: bytes) -> int:
        if len(content) > 40:
            return real(descriptor, content[:40])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", half)
        journal.record([dropped(2)])
        patched.setattr(os, "write", failing(errno.EROFS))
        journal.record([dropped(3)])
    journal.record([dropped(4)])

    assert whys(journal) == ["1", "4"]
    assert journal.lost == 2
    assert told(journal) == ["1", "2", "3", "4"]  # the mirror hears of them all the same


def test_a_journal_that_cannot_be_opened_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"")  # a file where its folder should be
    journal = Opened(tmp_path / "journal")
    journal.record([dropped(1)])

    assert (journal.lost, told(journal)) == (1, ["1"])
    (tmp_path / "journal").unlink()
    journal.record([dropped(2)])
    assert whys(journal) == ["2"]


def test_that_something_goes_is_on_disk_before_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    journal = Opened(tmp_path)
    journal.record([dropped(1)])
    assert synced == []
    journal.record([Event.of("made_room", {"tier": "node", "bytes": 1}, manifest=MANIFEST), dropped(2)])
    assert len(synced) == 1


def test_events_are_found_by_what_they_mention(tmp_path: Path) -> None:
    journal = Opened(tmp_path)
    journal.record([dropped("this"), Event.of("dropped", {"why": "that"}, manifest=f"b3:{'2' * 64}")])

    assert [event.manifest for event in journal.events("2" * 64)] == [f"b3:{'2' * 64}"]
