"""A node in a process that dies at one of its calls to the disk, without ending: from that call on, nothing it does reaches the disk.

Kills a state machine thousands of times where starting and killing real processes would take hours. What ``finally`` blocks and
error handling try to tidy up afterwards changes nothing, as after ``kill -9``.
"""

import asyncio
import logging
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import node_agent.fill.part
import node_agent.stage.view.build
from node_agent.metrics import AgentMetrics
from node_agent.settings import AgentSettings
from node_agent.stage.stage import StageRegistry
from tests.fakes.clock import Clock
from tests.support.agent.cache_world import World, shrink
from tests.support.agent.local_node import LocalNode, local_node

_CALLS = (
    *("rename", "replace", "link", "symlink", "unlink", "mkdir", "rmdir", "utime", "chmod", "fchmod"),
    *("truncate", "ftruncate", "fsync", "fdatasync", "pwrite", "write", "open"),
)
_CHANGES = os.O_CREAT | os.O_TRUNC


class Killed(BaseException):
    """The process is dead. No error of ours: nothing may handle it."""


class MortalDisk:
    """Counts the calls that change the disk; ``die_at`` says at which one, before its effect, everything ends.

    A write may have come half-way. Calls that change nothing, such as making a folder that is there, are not counted.
    """

    def __init__(self, seed: int) -> None:
        self.calls = 0
        self.is_dead = False
        self.last = ""
        self._chance = random.Random(seed)
        self._fatal = 0

    def die_at(self, number: int) -> None:
        """Count anew; 0 means never."""
        self.calls, self.is_dead, self._fatal = 0, False, number

    def check(self) -> None:
        """The end, for whoever waited for a task of a process that has died meanwhile."""
        if self.is_dead:
            raise Killed

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """For the time of the block, this process's calls go through here."""
        with ExitStack() as stack:
            for name in _CALLS:
                stack.enter_context(patch.object(os, name, self._counted(name, getattr(os, name))))
            for module, name in ((node_agent.fill.part, "allocate"), (node_agent.stage.view.build, "exchange")):
                stack.enter_context(patch.object(module, name, self._counted(name, getattr(module, name))))
            yield

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            if name == "open" and not (given[1] if len(given) > 1 else options.get("flags", 0)) & _CHANGES:
                return real(*given, **options)
            if self.is_dead:
                raise Killed
            if name == "mkdir" and not options.get("dir_fd") and os.path.lexists(given[0]):
                return real(*given, **options)
            self.calls += 1
            if self.calls == self._fatal:
                self._die(name, real, given)
            return real(*given, **options)

        return call

    def _die(self, name: str, real: Callable[..., Any], given: tuple[Any, ...]) -> None:
        self.is_dead, self.last = True, f"{name}{given[:2]}"[:200]
        if name in ("pwrite", "write") and len(given[1]):
            real(given[0], bytes(given[1])[: self._chance.randrange(len(given[1]))], *given[2:])
        raise Killed


class KilledNode:
    """A node without a network on one directory, how often something was tried on it, and what was wrong."""

    def __init__(self, root: Path, seed: int, manifests: int) -> None:
        self.root, self.cache = root, root / "cache"
        self.world = World.of(seed, manifests)
        self.disk = MortalDisk(seed)
        self.wall, self.elapsed = Clock(), Clock(0.0)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def node(self, cache_bytes: int) -> AbstractAsyncContextManager[LocalNode]:
        settings = AgentSettings(
            data_dir=self.root, cache_bytes=cache_bytes, headroom_bytes=0, cluster_cache_bytes=0, exposure="symlink"
        )
        return local_node(settings, self.world, AgentMetrics(StageRegistry()), self.wall, self.elapsed)

    def live(self, life: Coroutine[Any, Any, None]) -> None:
        """To its end, or until the disk kills it."""

        async def living() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # tasks of a dead process are nobody's
            await life

        try:
            asyncio.run(living())
        except BaseException:
            if not self.disk.is_dead:
                raise


async def _inline(call: Callable[..., Any], *given: Any, **options: Any) -> Any:
    await asyncio.sleep(0)
    return call(*given, **options)


@contextmanager
def one_history() -> Iterator[Path]:
    """A folder, in memory if possible, in a process that has tiny chunks and one thread, so that a seed is a history."""
    shrink()
    asyncio.to_thread = cast("Any", _inline)
    logging.disable(logging.CRITICAL)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
