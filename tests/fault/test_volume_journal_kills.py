"""A syncer that is killed while it writes its journal: all that it was told is noted is there, and nothing else."""

import random
import signal
import subprocess
import sys
from pathlib import Path

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.training.settling import Stamp
from node_agent.job.journal import Committed, VolumeJournal

KILLS = 25
FILES = 7

WRITER = """
import sys
from pathlib import Path
from tests.fault.test_volume_journal_kills import note_for_ever
note_for_ever(Path(sys.argv[1]), int(sys.argv[2]))
"""


def stamp_of(number: int) -> Stamp:
    """Each file changes every three rounds, so that the journal is written anew often."""
    return Stamp(3 * CHUNK_SIZE, number // (3 * FILES), 1, number % FILES, 1)


def note_for_ever(file: Path, first: int) -> None:
    with VolumeJournal(file, least_stale=20) as journal:
        number = first
        while True:
            index = number // FILES % 3
            journal.note_chunk(f"file-{number % FILES}", stamp_of(number), index, digest_of(b"%d" % number))
            journal.note_commit("checkpoint", Committed(str(number), frozenset({"f"})))
            print(number, flush=True)
            number += 1


def test_what_was_noted_before_a_kill_is_there(tmp_path: Path) -> None:
    file, chance, first = tmp_path / "journal", random.Random(3), 0
    for _ in range(KILLS):
        noted = killed_after(file, first, chance.randrange(1, 120))

        with VolumeJournal(file) as journal:
            for number in range(max(0, noted - FILES + 1), noted + 1):
                found = journal.chunks(f"file-{number % FILES}", stamp_of(number))
                if found:  # else the round that was killed has noted the file's next state
                    assert found[number // FILES % 3] == digest_of(b"%d" % number)
                else:
                    following = number + FILES
                    assert journal.chunks(f"file-{number % FILES}", stamp_of(following)), number
            committed = journal.committed("checkpoint")
        assert committed is not None
        assert int(committed.version) >= noted
        assert len(file.read_bytes().splitlines()) < 100
        first = int(committed.version) + 1


def killed_after(file: Path, first: int, count: int) -> int:
    """The last number of which the process, which was killed at any place after so many, has said that it is noted."""
    command = [sys.executable, "-c", WRITER, str(file), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        for _ in range(count):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().splitlines(keepends=True)
    said = [line for line in rest if line.endswith(b"\n")]
    return int(said[-1]) if said else first + count - 1
