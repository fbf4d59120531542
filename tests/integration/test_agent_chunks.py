"""The data plane: an agent serves what it holds to its peers, with the reader that they use."""

from pathlib import Path

import pytest

from bdn.core.errors import BdnError, NotFoundError
from bdn.net.http1.pool import ConnectionPool
from tests.support.agent.mirror import FORMS, AgentMirror
from tests.support.agent.peer import ask
from tests.support.agent.rig import MIB, Rig, metrics, noise, staged

pytest_plugins = ("tests.support.agent.fixtures",)

LARGE = noise(9 * MIB, 1)
FILES = {"large": LARGE, "small": b"small"}


@pytest.fixture(params=FORMS)
def mirror(server: AgentMirror, request: pytest.FixtureRequest) -> AgentMirror:
    return server.renewed(is_packed=request.param == "packed")


PIECES = [LARGE[: 8 * MIB], LARGE[8 * MIB :], b"small"]


async def test_every_chunk_of_a_staged_manifest_is_served_also_after_a_restart(
    mirror: AgentMirror, tmp_path: Path, peer: ConnectionPool
) -> None:
    rig, manifest = Rig(mirror, tmp_path), mirror.publish(FILES)
    async with rig.agent() as agent:
        await staged(agent, mirror, manifest)
        for piece in PIECES:
            assert await ask(peer, agent.data_port, piece, None) == piece
        figures = metrics(agent.metrics.render(await agent.holdings.tiers()).decode())
        assert figures["bdn_agent_served_bytes_total"] >= 9 * MIB  # the last piece is counted after it has arrived
    async with rig.agent() as agent:
        for piece in PIECES:
            assert await ask(peer, agent.data_port, piece, None) == piece


async def test_evicted_chunks_are_not_served(mirror: AgentMirror, tmp_path: Path, peer: ConnectionPool) -> None:
    rig, manifest = Rig(mirror, tmp_path, {"cache_bytes": 10 * MIB}), mirror.publish(FILES)
    async with rig.agent() as agent:
        stage = await staged(agent, mirror, manifest)
        await agent.stages.release(stage.id)
        await staged(agent, mirror, mirror.publish({"other": noise(5 * MIB, 2)}))

        with pytest.raises(NotFoundError):
            await ask(peer, agent.data_port, PIECES[0], None)


async def test_with_authentication_a_chunk_takes_a_grant_for_a_manifest_that_has_it(
    mirror: AgentMirror, tmp_path: Path, peer: ConnectionPool
) -> None:
    manifest, other = mirror.publish(FILES), mirror.publish({"other": b"other"})
    async with Rig(mirror, tmp_path, {"auth": "token"}).agent() as agent:
        await staged(agent, mirror, manifest, other)
        for piece in PIECES:
            assert await ask(peer, agent.data_port, piece, mirror.grant(manifest)) == piece
            for bearer, code in (
                (None, "UNAUTHENTICATED"),
                ("rubbish", "GRANT_INVALID"),
                (mirror.grant(manifest, expires_in=-1), "GRANT_EXPIRED"),
                (mirror.grant(other), "NOT_FOUND"),
            ):
                with pytest.raises(BdnError) as caught:
                    await ask(peer, agent.data_port, piece, bearer)
                assert caught.value.code == code
