"""A job that reads its files again and again while agents are killed, in a process of its own.

``python -m tests.support.crash.killing_reader`` takes a JSON list of folders of views on standard input, as ``Watched`` has them.
It ends with its standard input, and writes what it saw.
"""

import asyncio
import json
import os
import select
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from blake3 import blake3

_LONGEST_SECONDS = 240  # on a machine with a hundred other things to do


@dataclass(frozen=True)
class Watched:
    """A folder of views, which come and go, and what is in any of them: by digest, the paths of a file.

    Each is so many folders below it: its stage's, and those of its mount location.
    """

    mounts: str
    depth: int
    files: dict[str, list[str]]


@dataclass
class Seen:
    """What the reader saw."""

    files: int = 0
    wrong: list[str] = field(default_factory=list)


@asynccontextmanager
async def reading(mounts: Iterable[Path], depth: int, trees: Iterable[Mapping[str, bytes]]) -> AsyncIterator[Seen]:
    """A reader until the block ends; then it is known what it saw."""
    files: dict[str, list[str]] = {}
    for path, content in (file for tree in trees for file in tree.items()):
        files.setdefault(blake3(content).hexdigest(), []).append(path)
    pipe = asyncio.subprocess.PIPE
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.crash.killing_reader", stdin=pipe, stdout=pipe
    )
    assert reader.stdin
    reader.stdin.write(json.dumps([asdict(Watched(str(folder), depth, files)) for folder in mounts]).encode() + b"\n")
    seen = Seen()
    try:
        yield seen
    finally:
        async with asyncio.timeout(_LONGEST_SECONDS):
            reader.stdin.close()
            out, _ = await reader.communicate()
        found = json.loads(out)
        seen.files, seen.wrong = found["files"], found["wrong"]


def look(watched: Watched, seen: Seen) -> None:
    """Once at every file."""
    for folder, _, names in os.walk(watched.mounts):
        for path in (Path(folder, name) for name in names if ".building" not in folder):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                continue  # its stage is over
            seen.files += 1
            within = str(path.relative_to(watched.mounts)).split("/", watched.depth)[-1]
            if within not in watched.files.get(blake3(content).hexdigest(), ()):
                seen.wrong.append(f"{path} has {len(content)} bytes, or wrong ones")


def main() -> None:
    folders = [Watched(**row) for row in json.loads(sys.stdin.readline())]
    seen = Seen()
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        for watched in folders:
            look(watched, seen)
    print(json.dumps(asdict(seen)))


if __name__ == "__main__":
    main()
