"""Reads the files of a READY stage once in the background, so that the job's first read comes from memory."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from bdn.core.pace.rate_limit import TokenBucket
from bdn.core.units import format_size
from bdn.disk.durable import opened
from bdn.disk.threads import in_thread
from node_agent.background_tasks import BackgroundTasks
from node_agent.cache.node_cache import Clock
from node_agent.stage.stage import NodeStage, StageRegistry, Warming
from node_agent.stage.view.views import Views

logger = logging.getLogger(__name__)

RESERVE_SHARE: Final = 0.1  # of the memory, for jobs that start meanwhile
_PROC: Final = Path("/proc")
_GROUPS: Final = Path("/sys/fs/cgroup")


def memory_left(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes of page cache that files may use, including files cached already. Below zero: memory is scarce.

    A cgroup's page cache counts against its limit but is reclaimed first; see cgroup-v2.rst, memory.max.
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
        return None  # the root group, cgroup v1, or no cgroups
    return None if limit == "max" else int(limit)


def _own_groups(proc: Path, groups: Path) -> Iterator[Path]:
    """The process's own cgroup and its visible ancestors."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        number, _, name = line.split(":", 2)
        if number == "0":
            group = groups / name.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(groups))


def _figures(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}


STEP: Final = 16 * 1024 * 1024  # bytes between two checks of the memory, of other stages and of the clock
_STEP_FILES: Final = 512
_BUFFER: Final = 512 * 1024  # fits the processor's cache

Sleep = Callable[[float], Awaitable[object]]


class StagesFirst:
    """Paces background reads: ``rate`` bytes per second, and none while a stage fetches files."""

    def __init__(
        self, registry: StageRegistry, rate: int, sleep: Sleep = asyncio.sleep, clock: Clock = time.monotonic
    ) -> None:
        self._registry = registry
        self._sleep = sleep
        self._clock = clock
        self._bucket = TokenBucket(rate, STEP, clock())

    async def __call__(self, size: int) -> None:
        """Wait as long as ``size`` bytes take at this rate, then until no stage fetches files.

        Call before or after the read.
        """
        if size:
            await self._sleep(self._bucket.reserve(size, self._clock()))
        await self._registry.until_idle()


class Warmer:
    """Warms one stage at a time, all at one ``pace``. Used on the event loop only."""

    def __init__(
        self, background: BackgroundTasks, views: Views, pace: StagesFirst, memory: Callable[[], int] = memory_left
    ) -> None:
        """``memory`` returns the bytes of page cache that may be used without taking memory from jobs. Blocking."""
        self._background = background
        self._views = views
        self._pace = pace
        self._memory = memory
        self._turn = asyncio.Lock()

    def begin(self, stage: NodeStage) -> None:
        """Warm a READY stage that requests it, unless it is being warmed. Warming again is cheap."""
        record = stage.record
        if not record.warm or record.state != "READY" or (stage.warming and stage.warming.is_going_on):
            return
        stage.warming = warming = Warming(sum(mount.bytes_total or 0 for mount in record.mounts))
        warming.task = self._background.start(self._warm(stage, warming), f"warm {record.id}")

    async def _warm(self, stage: NodeStage, warming: Warming) -> None:
        record = stage.record
        places = [
            self._views.place(record.id, place) for place in dict.fromkeys(map(record.contents_at, record.mounts))
        ]
        async with self._turn:
            with closing(_read_through(places)) as steps:
                try:
                    await self._read(steps, warming)
                except Exception as error:
                    logger.exception("stopped warming stage %s because of a bug", stage.record.id)
                    warming.end("STOPPED", f"{type(error).__name__}: {error}")

    async def _read(self, steps: Generator[int, None, None], warming: Warming) -> None:
        count = 0
        while True:
            await self._pace(count)
            left = await in_thread(self._memory)
            if left < min(warming.bytes_read + STEP, warming.bytes_total):
                reason = f"no more than {format_size(max(0, left))} of memory may be used"
                warming.end("STOPPED" if warming.bytes_read else "SKIPPED", reason)
                return
            read = await in_thread(next, steps, None)
            if read is None:
                warming.end("WARM")
                return
            count = read
            warming.bytes_read += count


def _read_through(places: Iterable[Path]) -> Generator[int, None, None]:
    """Read every file below these folders, sorted by name; yields the bytes read, at most ``STEP`` at a time.

    Plain reads: the kernel limits ``POSIX_FADV_WILLNEED`` to one read-ahead window and does not report its
    completion.
    """
    buffer, size, files = memoryview(bytearray(_BUFFER)), 0, 0
    for path in _files(places):
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW) as descriptor:
            while count := os.readv(descriptor, [buffer[: STEP - size]]):
                size += count
                if size == STEP:
                    yield size
                    size, files = 0, 0
        files += 1
        if files >= _STEP_FILES:
            yield size
            size, files = 0, 0
    if size:
        yield size


def _files(places: Iterable[Path]) -> Generator[Path, None, None]:
    for place in places:
        for folder, folders, names in os.walk(place, onerror=_give_up):
            folders.sort()
            yield from (Path(folder, name) for name in sorted(names))


def _give_up(error: OSError) -> None:
    raise error
