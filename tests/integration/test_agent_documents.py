"""Pages of manifests travel through the ring as chunks do (``test_agent_ring.py``), and are given to grants as chunks are."""

from pathlib import Path

import httpx2
import pytest

from bdn.core.chunk import Digest
from bdn.core.layout import Manifest
from node_agent.app import Agent
from tests.support.agent.mirror import AgentMirror, fresh_mirror
from tests.support.agent.rig import Rig
from tests.support.content.noise import noise

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror

FILES = {"one.bin": noise(2_000_000, 3), **{f"small/{number}": noise(3_000 + number, number) for number in range(30)}}


def page_of(manifest: Manifest, mirror: AgentMirror) -> Digest:
    (page,) = mirror.trees[manifest.digest].root.pages
    return page.digest


def page_reads(manifest: Manifest, mirror: AgentMirror) -> int:
    return mirror.documents[f"/chunks/{page_of(manifest, mirror)}"]


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
