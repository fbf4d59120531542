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

    Each is so many folders below it: its stage's, and those of its mount location. The views of ``staying``, once they were
    seen, have to hold these paths for ever.
    """

    mounts: str
    depth: int
    files: dict[str, list[str]]
    staying: dict[str, list[str]]


@dataclass
class Seen:
    """What the reader saw."""

    files: int = 0
    views: int = 0  # of those that have to stay
    wrong: list[str] = field(default_factory=list)


@asynccontextmanager
async def reading(
    mounts: Iterable[Path],
    depth: int,
    trees: Iterable[Mapping[str, bytes]],
    staying: Mapping[Path, Iterable[str]] | None = None,
) -> AsyncIterator[Seen]:
    """A reader until the block ends; then it is known what it saw."""
    files: dict[str, list[str]] = {}
    for path, content in (file for tree in trees for file in tree.items()):
        files.setdefault(blake3(content).hexdigest(), []).append(path)
    stay = {str(view): list(paths) for view, paths in (staying or {}).items()}
    pipe = asyncio.subprocess.PIPE
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.crash.killing_reader", stdin=pipe, stdout=pipe
    )
    assert reader.stdin
    reader.stdin.write(
        json.dumps([asdict(Watched(str(folder), depth, files, stay)) for folder in mounts]).encode() + b"\n"
    )
    seen = Seen()
    try:
        yield seen
    finally:
        async with asyncio.timeout(_LONGEST_SECONDS):
            reader.stdin.close()
            out, _ = await reader.communicate()
        found = json.loads(out)
        seen.files, seen.views, seen.wrong = found["files"], found["views"], found["wrong"]


def look(watched: Watched, seen: Seen, stood: set[str]) -> None:
    """Once at every file. ``stood`` are the views that were seen and have to stay."""
    for folder, _, names in os.walk(watched.mounts):
        for path in (Path(folder, name) for name in names if ".building" not in folder):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                continue  # its stage is over, or it is missed below
            seen.files += 1
            within = str(path.relative_to(watched.mounts)).split("/", watched.depth)[-1]
            if within not in watched.files.get(blake3(content).hexdigest(), ()):
                seen.wrong.append(f"{path} has {len(content)} bytes, or wrong ones")
    stood |= {view for view in watched.staying if Path(view).is_dir()}
    seen.views = len(stood)
    for view in stood:
        seen.wrong += [f"{view}/{path} is missing" for path in watched.staying[view] if not Path(view, path).is_file()]


def main() -> None:
    folders = [Watched(**row) for row in json.loads(sys.stdin.readline())]
    seen, stood = Seen(), set[str]()
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        for watched in folders:
            look(watched, seen, stood)
    print(json.dumps(asdict(seen)))


if __name__ == "__main__":
    main()
