"""A file of any size, written in any order and killed at any point, is gone on with from what was durable, and is right."""

import shutil
import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bdn.core.chunk import CHUNK_SIZE, FileLayout, PlacedChunk
from bdn.disk.direct import DirectWrites
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles
from node_agent.fill import part as module
from node_agent.fill.part import PartialFile
from tests.support.content.layouts import whole
from tests.support.content.noise import noise
from tests.support.crash.scripted_writes import aligned

SYNC_CHUNKS = 2
TAILS = [0, 1, 511, 512, 4095, 4096, 4097, 256 * 1024 - 1, 256 * 1024 + 5, CHUNK_SIZE - 1]


def begin(root: Path, layout: FileLayout, *, is_direct: bool) -> tuple[Places, PartialFile]:
    places, writes = Places(root), DirectWrites()
    if not is_direct:
        writes.reason = "so that the page cache is used"
    places.make()
    part = PartialFile(WholeFiles(places), layout, writes)
    part.open()
    return places, part


def copy_of(places: Places, root: Path, lost: list[PlacedChunk]) -> None:
    """The disk as it is now, without chunks that were not synced: their blocks hold what was there before."""
    shutil.copytree(places.filling, root / "filling")
    for path in (root / "filling").glob("*.part"):
        with path.open("r+b") as file:
            for chunk in lost:
                file.seek(chunk.range.start)
                file.write(bytes(chunk.range.size))


@settings(max_examples=12, deadline=None)
@given(
    chunks=st.integers(0, 3),
    tail=st.sampled_from(TAILS),
    seed=st.integers(0, 1000),
    kill=st.integers(0, 4),
    was_direct=st.booleans(),
    is_direct=st.booleans(),
)
@example(chunks=0, tail=0, seed=0, kill=0, was_direct=True, is_direct=True)
def test_a_fill_that_is_killed_anywhere_loses_less_than_a_batch_and_its_file_is_right(
    chunks: int, tail: int, seed: int, kill: int, was_direct: bool, is_direct: bool
) -> None:
    content = noise(chunks * CHUNK_SIZE + tail)
    layout = whole(content)
    order = list(layout.placed())
    Random(seed).shuffle(order)
    written, buffer = order[:kill], memoryview(bytearray(CHUNK_SIZE))

    def write(part: PartialFile, chunk: PlacedChunk) -> None:
        part.write(chunk, aligned(content[chunk.range.start : chunk.range.stop]))

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(module, "SYNC_CHUNKS", SYNC_CHUNKS)
        places, part = begin(Path(folder) / "first", layout, is_direct=was_direct)
        for chunk in written:
            write(part, chunk)
        synced = len(written) // SYNC_CHUNKS * SYNC_CHUNKS if len(order) > 1 else 0
        copy_of(places, Path(folder) / "second", [chunk for chunk in order if chunk not in written[:synced]])
        part.close()

        places, part = begin(Path(folder) / "second", layout, is_direct=is_direct)
        held = [chunk for chunk in order if part.holds(chunk, buffer[: chunk.range.size])]
        assert held == written[:synced]
        for chunk in order:
            if chunk not in held:
                write(part, chunk)
        part.commit()
        part.close()
        file = places.file(layout.digest)
        assert (file.read_bytes(), file.stat().st_mode & 0o777) == (content, 0o444)
        assert list(places.filling.iterdir()) == []
