"""After an admission that came to nothing the cache counts what it counted, or what a disk that failed half-way has left."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bdn.core.cache.index import CacheIndex, Holder, Victim
from bdn.core.chunk import Digest, FileLayout
from bdn.core.errors import BdnError, DiskFailedError
from bdn.core.layout import Manifest
from node_agent.cache.node_cache import NodeCache
from node_agent.cache.records import Held, ScannedManifest
from node_agent.cache.space import SetAside
from tests.support.agent.cache import NO_EVENTS
from tests.support.content.layouts import held_of
from tests.support.content.names import named, stage

CONTENTS = [named(f"content {number}") for number in range(6)]
trees = st.frozensets(st.sampled_from(range(len(CONTENTS))), min_size=1, max_size=2)
NEVER = 10**6


class Disk:
    """In place of records, removals and space: what is written down, what is whole, and after how many steps it fails."""

    def __init__(self, budget: int, steps: int) -> None:
        self.recorded: dict[Digest, tuple[Manifest, float]] = {}
        self.whole: set[Digest] = set()
        self.budget, self.steps = budget, steps
        self.aside = SetAside()

    def step(self) -> None:
        if not self.steps:
            raise DiskFailedError("files", "Read-only file system")
        self.steps -= 1

    def save(self, held: Held, now: float) -> None:
        self.step()
        self.recorded[held.manifest.digest] = (held.manifest, now)

    def delete(self, victims: Iterable[Victim]) -> None:
        for victim in victims:
            self.step()
            self.recorded.pop(victim.manifest, None)
            for content in victim.contents:
                self.step()
                self.whole.discard(content)

    def left_of(self, victims: Iterable[Victim]) -> list[ScannedManifest]:
        left = [self.recorded[one.manifest] for one in victims if one.manifest in self.recorded]
        return [
            ScannedManifest(
                manifest.digest, manifest.contents, dict.fromkeys(self.whole & manifest.contents.keys(), True), used
            )
            for manifest, used in left
        ]

    def room(self, _: int) -> SimpleNamespace:
        return SimpleNamespace(budgets=SimpleNamespace(node=self.budget))

    def padding(self, _: object) -> int:
        return 0

    def free_files(self) -> None:
        return None


def held_of_tree(tree: Iterable[int], sizes: Sequence[int], name: str) -> Held:
    """``name`` keeps two of the same files apart."""
    return held_of(
        {
            f"{name}/{number}": FileLayout(CONTENTS[number], sizes[number], (CONTENTS[number],))
            for number in sorted(tree)
        }
    )


def counted(index: CacheIndex) -> dict[str, object]:
    """Everything that the index says, but for when and in which order what was asked for was used."""
    ledger = index.ledger
    return {
        "bytes": (ledger.committed_bytes, ledger.reserved_bytes),
        "whole": {content: ledger.is_committed(content) for content in CONTENTS},
        "names": {content: index.named_by(content) for content in CONTENTS},
        "sizes": {one: (index.size_of(one), index.is_complete(one)) for one in index.manifests()},
        "leases": {one: index.leases.holders(one) for one in index.manifests()},
    }


@pytest.mark.promise("space")
@given(
    sizes=st.tuples(*[st.integers(1, 2)] * len(CONTENTS)),
    held=st.lists(trees, min_size=1, max_size=3),
    newcomers=st.lists(trees, min_size=2, max_size=3),
    leased=st.frozensets(st.integers(1, 3)),
    slack=st.integers(0, 2),
    steps=st.sampled_from([0, NEVER, 1, 2, 3, 4]),
    is_again=st.booleans(),
)
@example(
    (1,) * 6, [frozenset({0, 1}), frozenset({2})], [frozenset({3, 4}), frozenset({0})], frozenset({1}), 1, 0, False
)
@example(
    (1,) * 6,
    [frozenset({0, 1}), frozenset({2})],
    [frozenset({3, 4}), frozenset({0}), frozenset({5})],
    frozenset({1}),
    1,
    NEVER,
    False,
)
def test_what_came_to_nothing_left_nothing_behind(
    sizes: tuple[int, ...],
    held: list[frozenset[int]],
    newcomers: list[frozenset[int]],
    leased: frozenset[int],
    slack: int,
    steps: int,
    is_again: bool,
) -> None:
    here = [held_of_tree(tree, sizes, f"old {number}") for number, tree in enumerate(held)]
    new = [held_of_tree(tree, sizes, f"new {number}") for number, tree in enumerate(newcomers)]
    used = sum(sizes[number] for number in frozenset().union(*held))
    index, disk = CacheIndex(), Disk(used + slack, steps)
    for number, manifest in enumerate(one.manifest for one in here):
        disk.recorded[manifest.digest] = (manifest, float(number))
        disk.whole |= manifest.contents.keys()
        index.restore(manifest.digest, manifest.contents, dict.fromkeys(manifest.contents, True), last_used=number)
        if number in leased:
            index.leases.take(manifest.digest, stage("other"))
    before, ages = counted(index), {one: index.recency.last_used(one) for one in index.manifests()}
    wanted = [*here[-1:], *new] if is_again else new

    try:
        _admit(index, disk, wanted, stage("new"))
    except DiskFailedError:
        for one in index.manifests():
            for content in index.contents_of(one):
                assert index.ledger.is_committed(content) == (content in disk.whole)
        assert index.ledger.reserved_bytes == 0
        assert not any(holder.stage_id == "new" for one in index.manifests() for holder in index.leases.holders(one))
    except BdnError:
        assert counted(index) == before
        asked = {one.root.digest for one in wanted}
        assert all(index.recency.last_used(one) == age for one, age in ages.items() if one not in asked)


def _admit(index: CacheIndex, disk: Disk, wanted: Sequence[Held], holder: Holder) -> None:
    shelf = cast("Any", SimpleNamespace(add=lambda _: None, remove=lambda _: None))
    some = cast("Any", disk)
    some.records = some
    cache = NodeCache(index, some, shelf, some, lambda: 1000.0, NO_EVENTS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asyncio, "to_thread", _inline)
        asyncio.run(cache.admit(wanted, holder))


async def _inline(call: Callable[..., object], *given: object) -> object:
    return call(*given)
