"""However many manifests a cache holds, the event loop does other work while the cache decides, and looks at each content once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bdn.core.cache.index import LOOKS_AT_ONCE, CacheIndex
from bdn.core.chunk import Digest, FileLayout
from node_agent.cache.cache_events import over_budget
from node_agent.cache.node_cache import NodeCache
from node_agent.cache.space import SetAside
from tests.support.agent.cache import NO_EVENTS
from tests.support.content.layouts import held_of
from tests.support.content.names import named, stage

FILES = 20
SHARED = [named(f"shared {number}") for number in range(FILES // 2)]  # every manifest has them
NEWCOMER = held_of({"new": FileLayout.of(10**6, (named("new"),))})


class Looks:
    """How many contents were looked at: in all, and at the most before the event loop had its turn."""

    def __init__(self) -> None:
        self.all = self.most = self._since = 0

    def look(self) -> None:
        self.all += 1
        self._since += 1
        self.most = max(self.most, self._since)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        async def take_turns() -> None:
            while True:
                self._since = 0
                await asyncio.sleep(0)

        turns = asyncio.create_task(take_turns())
        await asyncio.sleep(0)
        yield
        turns.cancel()


class WatchedContents(dict[Digest, int]):
    def __init__(self, looks: Looks, contents: dict[Digest, int]) -> None:
        super().__init__(contents)
        self._looks = looks

    def __iter__(self) -> Iterator[Digest]:
        for content in super().__iter__():
            self._looks.look()
            yield content


def cache_of(manifests: int, looks: Looks) -> NodeCache:
    index = CacheIndex()
    for number in range(manifests):
        own = [named(f"{number} {file}") for file in range(FILES - len(SHARED))]
        contents = dict.fromkeys((*SHARED, *own), 1)
        watched = WatchedContents(looks, contents)
        index.restore(named(f"manifest {number}"), watched, dict.fromkeys(contents, True), last_used=number)
    looks.all = looks.most = 0
    nothing = SimpleNamespace(delete=list, left_of=lambda _: [], records=SimpleNamespace(save=lambda *_: None))
    room = SimpleNamespace(budgets=SimpleNamespace(node=10**6))
    space = SimpleNamespace(padding=lambda _: 0, room=lambda _: room, free_files=lambda: None, aside=SetAside())
    chunks = SimpleNamespace(add=lambda _: None, remove=lambda _: None)
    return NodeCache(index, cast(Any, nothing), cast(Any, chunks), cast(Any, space), lambda: 1e6, NO_EVENTS)


async def evict_all(cache: NodeCache) -> None:
    account = over_budget("node", 0, 0, 0)
    plan = await cache.evict(lambda index: index.planning(size=10**9), "request", account)
    assert not cache.index.manifests()
    assert sum(victim.size for victim in plan.victims) == len({one for v in plan.victims for one in v.contents})


async def admit(cache: NodeCache) -> None:
    await cache.admit([NEWCOMER], stage("s"))
    assert cache.index.manifests() == (NEWCOMER.root.digest,)


@pytest.mark.parametrize("do", [evict_all, admit])
async def test_a_decision_about_many_manifests_looks_at_each_content_once_and_lets_the_event_loop_work(
    do: Callable[[NodeCache], Awaitable[None]],
) -> None:
    looks, manifests = Looks(), 1_000
    cache = cache_of(manifests, looks)
    async with looks.watched():
        await do(cache)
    assert looks.all <= 2 * manifests * FILES  # to decide, and to forget
    assert looks.most <= LOOKS_AT_ONCE + FILES
