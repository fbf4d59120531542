"""A job that reads its files again and again while agents are killed, in a process of its own.

``python -m tests.support.crash.killing_reader`` takes a JSON list of views on standard input: the view's path, whether it has to stay once it
was seen, and size and digest of each of its files. It ends with its standard input, and writes what it saw.
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
from typing import Self

from blake3 import blake3

_LONGEST_SECONDS = 240  # on a machine with a hundred other things to do


@dataclass(frozen=True)
class Watched:
    """A view, and what has to be in it."""

    view: str
    stays: bool
    files: dict[str, tuple[int, str]]

    @classmethod
    def of(cls, view: Path, files: Mapping[str, bytes], *, stays: bool) -> Self:
        found = {path: (len(content), blake3(content).hexdigest()) for path, content in files.items()}
        return cls(str(view), stays, found)


@dataclass
class Seen:
    """What the reader saw."""

    whole_views: int = 0
    wrong: list[str] = field(default_factory=list)


@asynccontextmanager
async def reading(views: Iterable[Watched]) -> AsyncIterator[Seen]:
    """A reader until the block ends; then it is known what it saw."""
    pipe = asyncio.subprocess.PIPE
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.crash.killing_reader", stdin=pipe, stdout=pipe
    )
    assert reader.stdin
    reader.stdin.write(json.dumps([asdict(view) for view in views]).encode() + b"\n")
    seen = Seen()
    try:
        yield seen
    finally:
        async with asyncio.timeout(_LONGEST_SECONDS):
            reader.stdin.close()
            out, _ = await reader.communicate()
        found = json.loads(out)
        seen.whole_views, seen.wrong = found["whole_views"], found["wrong"]


@asynccontextmanager
async def reading_all(mounts: Iterable[Path], trees: Iterable[Mapping[str, bytes]]) -> AsyncIterator[Seen]:
    """A reader of whatever stages there are: views come and go, but what can be read is a file of one of these trees."""
    files = [Watched.of(Path(), tree, stays=False).files for tree in trees]
    known = {f"{path} {size} {digest}": (size, digest) for tree in files for path, (size, digest) in tree.items()}
    async with reading([Watched(str(folder), False, known) for folder in mounts]) as seen:
        yield seen


def look_at_all(watched: Watched) -> tuple[int, list[str]]:
    """How many files were read in all views below this folder, and what was wrong."""
    read, wrong = 0, []
    paths = [Path(folder, name) for folder, _, names in os.walk(watched.view) for name in names]
    for path in paths:
        if ".building" in str(path):
            continue
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue  # its stage is over
        found = f"{len(content)} {blake3(content).hexdigest()}"
        relative = str(path.relative_to(watched.view)).split("/", 3)[-1]
        if f"{relative} {found}" not in watched.files:
            wrong.append(f"{path}: {found}")
        read += 1
    return read, wrong


def look(watched: Watched, *, was_seen: bool) -> list[str] | None:
    """What is wrong in a view; None when there is no view yet."""
    root = Path(watched.view)
    if not root.is_dir():
        return [f"{root} vanished"] if was_seen and watched.stays else None
    wrong = []
    for path, (size, digest) in watched.files.items():
        try:
            content = (root / path).read_bytes()
        except FileNotFoundError:
            if watched.stays:
                wrong.append(f"{root / path} is missing")
            continue
        if len(content) != size or blake3(content).hexdigest() != digest:
            wrong.append(f"{root / path} has {len(content)} bytes, or wrong ones")
    return wrong


def main() -> None:
    views = [Watched(**row) for row in json.loads(sys.stdin.readline())]
    seen, known = Seen(), set[str]()
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        for watched in views:
            if Path(watched.view).name == "mounts":
                read, wrong = look_at_all(watched)
                seen.whole_views += read
                seen.wrong += wrong
                continue
            found = look(watched, was_seen=watched.view in known)
            if found is not None:
                known.add(watched.view)
                seen.whole_views += not found
                seen.wrong += found
    print(json.dumps(asdict(seen)))


if __name__ == "__main__":
    main()
