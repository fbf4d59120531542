"""Manifests and layouts travel through the ring as chunks do: a cluster reads each from the mirror once."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from bdn.core.chunk import FileEntry, Manifest
from bdn.core.ring.placement import Placement
from bdn.wire.heartbeat_schema import MemberDocument
from node_agent.app import Agent
from tests.support.agent.mirror import AgentMirror, fresh_mirror, in_both_forms
from tests.support.agent.rig import Rig, metrics, noise
from tests.support.agent.ring import Ring
from tests.support.content.names import named
from tests.support.content.trees import tree

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror

FILES = {"one.bin": noise(2_000_000, 3), **{f"small/{number}": noise(3_000 + number, number) for number in range(30)}}
STRANGER = "stranger"


@pytest.fixture
def ring(mirror: AgentMirror, tmp_path: Path) -> Ring:
    return Ring(mirror, tmp_path)


def once(manifest: Manifest) -> dict[str, int]:
    """What a mirror is asked for that is asked for each document once."""
    path = f"/manifests/{manifest.digest}"
    return {path: 1, f"{path}/layout": 1}


def join(ring: Ring, address: str, nodes: int) -> Manifest:
    """The stranger is a member beside so many nodes, and owns the documents of this manifest of ``FILES`` and one more."""
    assert ring.mirror.ring is not None
    ring.mirror.ring[STRANGER] = MemberDocument(node=STRANGER, advertise=address, roles=["cluster"])
    members = [STRANGER, *(f"node-{number}" for number in range(nodes))]
    for number in range(1000):
        manifest = ring.mirror.publish(FILES | {"more": str(number).encode()})
        if Placement([manifest.digest], members).owner(0) == STRANGER:
            return manifest
    raise AssertionError("the stranger owns nothing")


async def shown(ring: Ring, manifest: Manifest) -> list[dict[str, bytes]]:
    """What jobs see on each node, without the one file more."""
    stages = await ring.staged_by_all(manifest)
    trees = [tree(Path(stage.mounts[0].path)) for stage in stages]
    return [{path: content for path, content in one.items() if path != "more"} for one in trees]


@in_both_forms
async def test_a_cold_cluster_reads_each_document_once(ring: Ring, mirror: AgentMirror) -> None:
    manifest = mirror.publish(FILES)
    async with ring.nodes(8, byte_threads=2) as agents:
        assert await shown(ring, manifest) == [FILES] * 8
        assert mirror.documents == once(manifest)

        told = [metrics(agent.metrics.render({}).decode()) for agent in agents]
        assert sum(one.get('bdn_agent_documents_total{tier="mirror"}', 0) for one in told) == 2
        assert all(one['bdn_agent_documents_total{tier="cluster"}'] >= 2 for one in told)


def gone(_: ExitStack) -> str:
    return "http://127.0.0.1:1"


def of_a_version_before(stack: ExitStack) -> str:
    """It gives what it holds, and obtains nothing."""
    return stack.enter_context(AgentMirror().running()).url


@pytest.mark.parametrize("stranger", [gone, of_a_version_before])
async def test_the_next_owner_reads_them_where_the_owner_does_not(
    ring: Ring, mirror: AgentMirror, stranger: Callable[[ExitStack], str]
) -> None:
    with ExitStack() as stack:
        manifest = join(ring, stranger(stack), nodes=3)
        async with ring.nodes(3):
            assert await shown(ring, manifest) == [FILES] * 3

    assert mirror.documents == once(manifest)


def another_manifest(liar: AgentMirror, manifest: Manifest) -> None:
    liar.manifests[manifest.digest] = Manifest.of([FileEntry("a", 5, named("other"))])


def files_left_out(liar: AgentMirror, manifest: Manifest) -> None:
    layout = liar.layouts[manifest.digest]
    liar.layouts[manifest.digest] = layout.model_copy(update={"files": layout.files[1:]})


def wrong_places(liar: AgentMirror, manifest: Manifest) -> None:
    """Small files lie a byte before their place. Nobody knows before they were cut out of their slab."""
    layout = liar.layouts[manifest.digest].model_copy(deep=True)
    for file in layout.files:
        if file.slab is not None:
            file.slab.offset = max(0, file.slab.offset - 1)
    liar.layouts[manifest.digest] = layout


def no_such_slab(liar: AgentMirror, manifest: Manifest) -> None:
    """As a layout that is out of date names one."""
    layout = liar.layouts[manifest.digest].model_copy(deep=True)
    for file in layout.files:
        if file.slab is not None:
            file.slab.digest = str(named("gone"))
    liar.layouts[manifest.digest] = layout


@pytest.mark.promise("network")
@pytest.mark.parametrize(
    ("lie", "read_once"),
    [(another_manifest, True), (files_left_out, True), (wrong_places, False), (no_such_slab, False)],
)
async def test_an_owner_that_lies_is_not_believed(
    ring: Ring, mirror: AgentMirror, lie: Callable[[AgentMirror, Manifest], None], read_once: bool
) -> None:
    liar = AgentMirror(signer=mirror.signer)
    with liar.running():
        manifest = join(ring, liar.url, nodes=3)
        liar.manifests[manifest.digest] = mirror.manifests[manifest.digest]
        liar.layouts[manifest.digest] = mirror.layouts[manifest.digest]
        lie(liar, manifest)
        async with ring.nodes(3):
            assert await shown(ring, manifest) == [FILES] * 3

    assert liar.documents
    # Who finds out in the middle of a fill asks the mirror itself: each node, and the next owner for its peers.
    layouts = mirror.documents[f"/manifests/{manifest.digest}/layout"]
    assert layouts == 1 if read_once else 1 <= layouts <= 4


async def asked(
    agent: Agent, manifest: Manifest, grant: str | None, kind: str = "/layout", **more: str
) -> httpx2.Response:
    headers = {"BDN-Manifest": str(manifest.digest)} | ({"Authorization": f"Bearer {grant}"} if grant else {}) | more
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{agent.data_port}", trust_env=False) as plane:
        return await plane.get(f"/manifests/{manifest.digest}{kind}", headers=headers)


@pytest.mark.promise("access")
async def test_an_owner_obtains_documents_for_grants_that_name_them_alone(mirror: AgentMirror, tmp_path: Path) -> None:
    manifest, other = mirror.publish(FILES), mirror.publish({"other": b"another"})
    async with Rig(mirror, tmp_path, {"auth": "token"}).agent() as agent:
        await agent.heartbeats.beat()

        async def refused(kind: str) -> list[int]:
            grants = None, "no grant", mirror.grant(other), mirror.grant(manifest, expires_in=-1)
            return [(await asked(agent, manifest, grant, kind)).status_code for grant in grants]

        assert [await refused(kind) for kind in ("", "/layout")] == [[401, 403, 404, 403]] * 2
        assert not mirror.documents

        first = await asked(agent, manifest, mirror.grant(manifest))
        again = await asked(agent, manifest, mirror.grant(manifest))
        whole = await asked(agent, manifest, mirror.grant(manifest), "")
        assert [await refused(kind) for kind in ("", "/layout")] == [[401, 403, 404, 403]] * 2  # what is kept, too
        unasked = await asked(agent, other, mirror.grant(other), **{"BDN-Manifest": str(manifest.digest)})
        unpacked = await asked(agent, manifest, mirror.grant(manifest), **{"Accept-Encoding": "identity"})

    assert first.headers["content-encoding"] == "gzip"
    assert json.loads(first.content)["manifest"] == str(manifest.digest)
    assert again.content == first.content
    assert whole.content == manifest.canonical
    assert (unasked.status_code, unpacked.status_code) == (404, 404)
    assert mirror.documents == once(manifest)


@pytest.mark.promise("access")
async def test_each_organisation_is_given_its_own_layout(mirror: AgentMirror, tmp_path: Path) -> None:
    manifest = mirror.publish({"t1": b"the same", "t2": b"in both"})
    slabs = {name: mirror.pack_for(name, manifest, [b"the same", b"in both", name.encode()])[0] for name in "ab"}
    async with Rig(mirror, tmp_path, {"auth": "token"}).agent() as agent:
        await agent.heartbeats.beat()
        for name, slab in slabs.items():
            answer = await asked(agent, manifest, mirror.grant(manifest, organisation=name))
            assert str(slab) in answer.text
            assert not any(str(other) in answer.text for other in slabs.values() if other != slab)


async def test_an_owner_without_its_mirror_says_so(mirror: AgentMirror, tmp_path: Path) -> None:
    manifest = mirror.publish(FILES)
    async with Rig(mirror, tmp_path).agent() as agent:
        await agent.heartbeats.beat()
        mirror.down = True
        answer = await asked(agent, manifest, mirror.grant(manifest))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "STORE_UNAVAILABLE")
        mirror.down = False
        assert (await asked(agent, manifest, mirror.grant(manifest))).status_code == 200
