"""How much the page cache may hold: what the machine has left, and what this process's control groups allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

RESERVE_SHARE: Final = 0.1  # of the memory, for jobs that begin meanwhile
_PROC: Final = Path("/proc")
_GROUPS: Final = Path("/sys/fs/cgroup")


def memory_left(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes that files may take in memory, those of files that are there already included. Below zero: it is scarce.

    A group's page cache counts against its limit, but is given up before anything else; see cgroup-v2.rst, memory.max.
    """
    machine = _figures(proc / "meminfo")
    left = [1024 * (machine["MemAvailable:"] - int(RESERVE_SHARE * machine["MemTotal:"]))]
    left.extend(_left_in(group) for group in _own_groups(proc, groups) if _limit_of(group) is not None)
    return min(left)


def _left_in(group: Path) -> int:
    limit = _limit_of(group) or 0
    used = int((group / "memory.current").read_text())
    kept = _figures(group / "memory.stat")
    return int(limit * (1 - RESERVE_SHARE)) - used + kept["active_file"] + kept["inactive_file"]


def _limit_of(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text().strip()
    except OSError:
        return None  # the root, another version of control groups, or none
    return None if limit == "max" else int(limit)


def _own_groups(proc: Path, groups: Path) -> Iterator[Path]:
    """The process's own group and those above it, as far as they can be seen from here."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        number, _, name = line.split(":", 2)
        if number == "0":
            group = groups / name.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(groups))


def _figures(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
