"""A job that reads its files again and again while agents are killed."""

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from blake3 import blake3


@dataclass
class Seen:
    """What the reader saw: how many files, and which of them were not whole."""

    files: int = 0
    wrong: list[str] = field(default_factory=list)


@contextmanager
def reading(mounts: Iterable[Path], depth: int, trees: Iterable[Mapping[str, bytes]]) -> Iterator[Seen]:
    """A thread reads all files of these folders of views until the block ends.

    A view is ``depth`` folders below: its stage's, and the folders of its mount location.
    """
    folders, known = (
        list(mounts),
        {(path, blake3(content).digest()) for tree in trees for path, content in tree.items()},
    )
    seen, is_over = Seen(), Event()

    def read() -> None:
        while not is_over.wait(0.02):
            for folder in folders:
                _look(folder, depth, known, seen)

    with ThreadPoolExecutor(1) as thread:
        reader = thread.submit(read)
        try:
            yield seen
        finally:
            is_over.set()
    reader.result()


def _look(mounts: Path, depth: int, known: set[tuple[str, bytes]], seen: Seen) -> None:
    for folder, _, names in os.walk(mounts):
        for path in (Path(folder, name) for name in names if ".building" not in folder):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                continue  # its stage is over
            seen.files += 1
            within = str(path.relative_to(mounts)).split("/", depth)[-1]
            if (within, blake3(content).digest()) not in known:
                seen.wrong.append(f"{path} has {len(content)} bytes, or wrong ones")
