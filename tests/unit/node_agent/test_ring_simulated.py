"""A whole cluster, simulated with the real rules: what it costs the mirror, and when the last node is through.

Times are those of the simulated links, in times that one node alone needs.
"""

from dataclasses import replace

import pytest

from bdn.core.chunk import CHUNK_SIZE
from tests.support.simulation.links import FluidLinks, QueuedLinks
from tests.support.simulation.ring import Case, Ring

LINK = 50e6


def through(case: Case, *, is_exact: bool = True) -> Ring:
    """A run in which everybody who lives has got everything, and nobody asked for more than a twentieth twice."""
    ring = Ring(case, FluidLinks if is_exact else QueuedLinks)
    ring.run()
    assert all(node.left == 0 for node in ring.survivors)
    assert all(20 * node.hedges.used <= case.chunks * CHUNK_SIZE for node in ring.nodes)
    return ring


def cluster(
    nodes: int, chunks: int, kills: dict[int, float] | None = None, slow: dict[int, float] | None = None
) -> Case:
    return Case(nodes, chunks, LINK, LINK, kills=kills or {}, slow=slow or {})


@pytest.mark.parametrize(("nodes", "chunks", "is_exact"), [(8, 64, True), (20, 128, False), (40, 256, False)])
def test_the_mirror_sends_each_chunk_once_however_many_nodes_want_it(
    nodes: int, chunks: int, *, is_exact: bool
) -> None:
    ring = through(cluster(nodes, chunks), is_exact=is_exact)
    assert ring.origin_bytes == chunks * CHUNK_SIZE
    assert ring.last_ratio <= 1.3
    assert not any(node.retries or node.hedges.used for node in ring.nodes)


@pytest.mark.parametrize(("nodes", "slow"), [(8, 0), (8, 3), (2, 1)])
def test_a_member_at_a_twentieth_holds_nobody_up(nodes: int, slow: int) -> None:
    ring = through(cluster(nodes, 128, slow={slow: 20.0}))
    owned = len(ring.placement.owned[slow])
    assert ring.last_ratio <= 1.6
    assert ring.origin_bytes <= (128 + 1.5 * owned) * CHUNK_SIZE  # it reads its own, and so do those who come next


def test_a_slow_node_blames_nobody_for_its_own_link() -> None:
    slow = through(cluster(8, 128, slow={3: 20.0})).nodes[3]
    assert (slow.retries, slow.hedges.used) == (0, 0)


def test_one_member_killed_and_one_slow_hold_nobody_up() -> None:
    alone = cluster(8, 128).alone_seconds
    assert through(cluster(8, 128, slow={3: 20.0}, kills={5: alone / 2})).last_ratio <= 2.0


def test_what_a_killed_member_owned_is_read_once_more_at_most() -> None:
    ring = through(cluster(20, 128, kills={3: 10.0}), is_exact=False)
    assert ring.origin_bytes <= (128 + len(ring.placement.owned[3])) * CHUNK_SIZE
    assert ring.last_ratio <= 2.0


def test_a_member_that_joins_and_one_that_comes_late_cost_the_mirror_little() -> None:
    alone = cluster(20, 128).alone_seconds
    ring = through(replace(cluster(20, 128), joins={19: alone / 2}, starts={7: alone / 4}), is_exact=False)
    assert ring.origin_ratio <= 1.1
    assert ring.last_ratio <= 2.0
