"""What was sent of a volume is known to whoever comes next, whatever became of the file; and what is wrong in it is not believed."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.core.errors import DiskFailedError
from bdn.core.training.settling import Stamp
from node_agent.job.journal import Committed, VolumeJournal
from tests.support.crash.scripted_writes import failing

STAMP = Stamp(3 * CHUNK_SIZE, -5, 2**62, 7, 8)
CHUNKS = {index: digest_of(b"%d" % index) for index in range(3)}
PATH = "checkpoint-1/ü \n.safetensors"


def filled(file: Path) -> None:
    with VolumeJournal(file) as journal:
        for index, digest in CHUNKS.items():
            journal.note_chunk(PATH, STAMP, index, digest)
        journal.note_commit("checkpoint-1", Committed("mir_1", frozenset({"f1"})))


def known(file: Path) -> tuple[dict[int, Digest], Committed | None]:
    with VolumeJournal(file) as journal:
        return dict(journal.chunks(PATH, STAMP)), journal.committed("checkpoint-1")


def test_what_was_noted_is_there_for_whoever_comes_next(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    assert known(file) == ({}, None)

    filled(file)

    assert known(file) == (CHUNKS, Committed("mir_1", frozenset({"f1"})))


@pytest.mark.parametrize("number", range(5))
def test_chunks_of_a_file_that_has_changed_say_nothing(tmp_path: Path, number: int) -> None:
    filled(tmp_path / "journal")
    changed = Stamp(*(value + (index == number) for index, value in enumerate(STAMP)))

    with VolumeJournal(tmp_path / "journal") as journal:
        assert journal.chunks(PATH, changed) == {}
        assert journal.chunks("other", STAMP) == {}
        journal.note_chunk(PATH, changed, 1, CHUNKS[0])
        assert (journal.chunks(PATH, changed), journal.chunks(PATH, STAMP)) == ({1: CHUNKS[0]}, {})


def test_the_last_commit_of_a_name_counts(tmp_path: Path) -> None:
    filled(tmp_path / "journal")

    with VolumeJournal(tmp_path / "journal") as journal:
        journal.note_commit("checkpoint-1", Committed("mir_2", frozenset({"f2"})))

    assert known(tmp_path / "journal")[1] == Committed("mir_2", frozenset({"f2"}))


@pytest.fixture(name="whole", scope="module")
def a_whole_journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("journal") / "journal"
    filled(file)
    return file


def test_a_file_that_was_cut_anywhere_keeps_its_whole_lines_and_takes_more(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    for stop in range(len(content)):
        file = tmp_path / "journal"
        file.write_bytes(content[:stop])
        lines = (content[:stop] + b"\n").count(b"\n", 0, stop) + (content[stop : stop + 1] == b"\n")
        expected = {index: digest for index, digest in CHUNKS.items() if index < lines}
        with VolumeJournal(file) as journal:
            assert journal.chunks(PATH, STAMP) == expected
            journal.note_commit("checkpoint-1", Committed("mir_9", frozenset({"f9"})))
        assert known(file) == (expected, Committed("mir_9", frozenset({"f9"})))


@given(data=st.data())
def test_a_byte_that_is_wrong_takes_its_line_and_nothing_else(whole: Path, data: st.DataObject) -> None:
    content = bytearray(whole.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] = data.draw(st.integers(0, 255).filter(lambda value: value != content[at]))
    file = whole.with_name("wrong")
    file.write_bytes(content)

    chunks, committed = known(file)

    assert chunks.items() <= CHUNKS.items()
    assert committed in {None, Committed("mir_1", frozenset({"f1"}))}
    assert len(chunks) + (committed is not None) >= 2  # a line end that is gone joins two lines


@given(content=st.binary(max_size=300))
def test_rubbish_is_not_believed(whole: Path, content: bytes) -> None:
    file = whole.with_name("rubbish")
    file.write_bytes(content)

    assert known(file) == ({}, None)


def test_a_chunk_that_the_file_does_not_have_is_not_believed(tmp_path: Path) -> None:
    with VolumeJournal(tmp_path / "journal") as journal:
        journal.note_chunk(PATH, STAMP, 3, CHUNKS[0])
        journal.note_chunk(PATH, STAMP, -1, CHUNKS[0])

    assert known(tmp_path / "journal") == ({}, None)


def test_a_file_that_is_mostly_stale_is_written_anew(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    with VolumeJournal(file, least_stale=20) as journal:
        journal.note_commit("checkpoint-1", Committed("mir_1", frozenset({"f1"})))
        for number in range(500):
            journal.note_chunk(PATH, STAMP._replace(mtime=number), 0, CHUNKS[0])
        assert len(file.read_bytes().splitlines()) < 30
        for index, digest in CHUNKS.items():
            journal.note_chunk(PATH, STAMP, index, digest)
        assert journal.chunks(PATH, STAMP) == CHUNKS

    assert known(file) == (CHUNKS, Committed("mir_1", frozenset({"f1"})))


def test_files_that_are_gone_are_forgotten_and_commits_are_not(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    filled(file)
    with VolumeJournal(file, least_stale=3) as journal:
        journal.retain({PATH: STAMP})
        assert journal.chunks(PATH, STAMP) == CHUNKS
        journal.retain({PATH: STAMP._replace(ctime=1)})

    assert known(file) == ({}, Committed("mir_1", frozenset({"f1"})))
    assert len(file.read_bytes().splitlines()) == 1


def test_a_disk_that_was_full_for_a_line_takes_nothing_from_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, real = tmp_path / "journal", os.write
    refuse = failing(28)

    def halved(descriptor: int, content: bytes) -> int:
        monkeypatch.setattr(os, "write", refuse)
        return real(descriptor, content[:9])

    with VolumeJournal(file) as journal:
        journal.note_chunk(PATH, STAMP, 0, CHUNKS[0])
        monkeypatch.setattr(os, "write", halved)
        with pytest.raises(DiskFailedError):
            journal.note_chunk(PATH, STAMP, 1, CHUNKS[1])
        monkeypatch.undo()
        journal.note_chunk(PATH, STAMP, 2, CHUNKS[2])

    assert known(file)[0] == {0: CHUNKS[0], 2: CHUNKS[2]}
