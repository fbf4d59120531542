"""Pages of manifests travel through the ring as chunks do: a cluster reads each from the mirror once."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from bdn.core.chunk import Digest
from bdn.core.layout import Manifest
from bdn.core.ring.placement import Placement
from bdn.wire.heartbeat_schema import MemberDocument
from node_agent.app import Agent
from tests.support.agent.mirror import AgentMirror, flipped, fresh_mirror, in_both_forms
from tests.support.agent.rig import Rig, staged
from tests.support.agent.ring import Ring
from tests.support.content.noise import noise
from tests.support.content.trees import tree

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror

FILES = {"one.bin": noise(2_000_000, 3), **{f"small/{number}": noise(3_000 + number, number) for number in range(30)}}
STRANGER = "stranger"


@pytest.fixture
def ring(mirror: AgentMirror, tmp_path: Path) -> Ring:
    return Ring(mirror, tmp_path)


def page_of(manifest: Manifest, mirror: AgentMirror) -> Digest:
    (page,) = mirror.trees[manifest.digest].root.pages
    return page.digest


def page_reads(manifest: Manifest, mirror: AgentMirror) -> int:
    return mirror.documents[f"/chunks/{page_of(manifest, mirror)}"]


def join(ring: Ring, address: str, nodes: int) -> Manifest:
    """The stranger is a member beside so many nodes, and owns the page of this manifest of ``FILES`` and one more."""
    assert ring.mirror.ring is not None
    ring.mirror.ring[STRANGER] = MemberDocument(node=STRANGER, advertise=address, roles=["cluster"])
    members = [STRANGER, *(f"node-{number}" for number in range(nodes))]
    for number in range(1000):
        manifest = ring.mirror.publish(FILES | {"more": str(number).encode()})
        if Placement([page_of(manifest, ring.mirror)], members).owner(0) == STRANGER:
            return manifest
    raise AssertionError("the stranger owns nothing")


async def shown(ring: Ring, manifest: Manifest) -> list[dict[str, bytes]]:
    """What jobs see on each node, without the one file more."""
    stages = await ring.staged_by_all(manifest)
    trees = [tree(Path(stage.mounts[0].path)) for stage in stages]
    return [{path: content for path, content in one.items() if path != "more"} for one in trees]


@in_both_forms
async def test_a_cold_cluster_reads_each_page_once(ring: Ring, mirror: AgentMirror) -> None:
    manifest = mirror.publish(FILES)
    async with ring.nodes(8, byte_threads=2):
        assert await shown(ring, manifest) == [FILES] * 8

    assert page_reads(manifest, mirror) == 1
    roots = mirror.documents[f"/manifests/{manifest.digest}"]
    assert 8 <= roots <= 16  # each node for its stage, and owners for their peers


async def test_a_node_that_holds_a_manifest_gives_it_to_its_peers_while_the_mirror_is_down(
    ring: Ring, mirror: AgentMirror
) -> None:
    files = {"one.bin": FILES["one.bin"]}
    manifest = mirror.publish(files)
    async with ring.agent("node-0") as first:
        await staged(first, mirror, manifest)
        async with ring.agent("node-1", cluster_cache_bytes=0) as second:
            mirror.down = True
            stage = await staged(second, mirror, manifest)
            assert tree(Path(stage.mounts[0].path)) == files


def gone(_: ExitStack) -> str:
    return "http://127.0.0.1:1"


def holding_nothing(stack: ExitStack) -> str:
    return f"http://127.0.0.1:{stack.enter_context(AgentMirror().running()).data_port}"


@pytest.mark.parametrize("stranger", [gone, holding_nothing])
async def test_the_next_owner_reads_a_page_where_the_owner_does_not(
    ring: Ring, mirror: AgentMirror, stranger: Callable[[ExitStack], str]
) -> None:
    with ExitStack() as stack:
        manifest = join(ring, stranger(stack), nodes=3)
        async with ring.nodes(3):
            assert await shown(ring, manifest) == [FILES] * 3

    # Once more where a peer asks the next owner before that one holds the manifest.
    assert page_reads(manifest, mirror) <= 2


@pytest.mark.promise("network")
async def test_an_owner_that_sends_a_wrong_page_is_not_believed(ring: Ring, mirror: AgentMirror) -> None:
    liar = AgentMirror(signer=mirror.signer)
    with liar.running():
        manifest = join(ring, f"http://127.0.0.1:{liar.data_port}", nodes=3)
        page = page_of(manifest, mirror)
        liar.pages_of[manifest.digest], liar.chunks_of[manifest.digest] = {page}, set()
        liar.store.put(page, bytearray(mirror.trees[manifest.digest].pages[0]))
        liar.faults[page] = [flipped] * 20
        async with ring.nodes(3):
            assert await shown(ring, manifest) == [FILES] * 3

    assert liar.documents[f"/chunks/{page}"]
    assert page_reads(manifest, mirror) <= 2  # likewise


async def asked(agent: Agent, chunk: Digest, manifest: Manifest, grant: str | None) -> httpx2.Response:
    """As a peer asks an owner."""
    headers = {"BDN-Manifest": str(manifest.digest)} | ({"Authorization": f"Bearer {grant}"} if grant else {})
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{agent.data_port}", trust_env=False) as plane:
        return await plane.get(f"/chunks/{chunk}", headers=headers)


@pytest.mark.promise("access")
async def test_an_owner_obtains_pages_for_grants_that_name_their_manifest_alone(
    mirror: AgentMirror, tmp_path: Path
) -> None:
    manifest, other = mirror.publish(FILES), mirror.publish({"other": b"another"})
    page, grant = page_of(manifest, mirror), mirror.grant(manifest)
    async with Rig(mirror, tmp_path, {"auth": "token"}).agent() as agent:
        await agent.heartbeats.beat()

        async def refused() -> list[int]:
            grants = None, "no grant", mirror.grant(other), mirror.grant(manifest, expires_in=-1)
            return [(await asked(agent, page, manifest, grant)).status_code for grant in grants]

        assert await refused() == [401, 403, 404, 403]
        assert not mirror.documents

        answers = [await asked(agent, page, manifest, grant) for _ in range(2)]
        assert await refused() == [401, 403, 404, 403]  # what is kept, too
        foreign = [await asked(agent, page, other, mirror.grant(other, manifest))]
        foreign += [await asked(agent, page_of(other, mirror), manifest, mirror.grant(other, manifest))]

    assert [answer.content for answer in answers] == [mirror.trees[manifest.digest].pages[0]] * 2
    assert [answer.status_code for answer in foreign] == [404, 404]  # it is not a page of the manifest that is named
    assert page_reads(manifest, mirror) == 1


async def test_an_owner_without_its_mirror_says_so(mirror: AgentMirror, tmp_path: Path) -> None:
    manifest = mirror.publish(FILES)
    async with Rig(mirror, tmp_path).agent() as agent:
        await agent.heartbeats.beat()
        mirror.down = True
        answer = await asked(agent, page_of(manifest, mirror), manifest, mirror.grant(manifest))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "STORE_UNAVAILABLE")
        mirror.down = False
        assert (await asked(agent, page_of(manifest, mirror), manifest, mirror.grant(manifest))).status_code == 200
