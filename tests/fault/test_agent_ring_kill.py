"""A member of the cluster is killed while all stage: the others finish, and what they have is right."""

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path

from bdn.core.digest import Digest
from bdn.wire.stage_schema import StageRequest
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.process import Program
from tests.support.agent.rig import MIB, noise
from tests.support.content.trees import tree

FILES = {"large": noise(97 * MIB, 1), "other": noise(23 * MIB, 2)}
NODES = ("node-0", "node-1", "node-2")
_HALF = 8  # of 16 chunks


async def test_the_others_finish_when_a_member_is_killed_at_half_time(tmp_path: Path) -> None:
    mirror = AgentMirror()
    mirror.ring = {}
    manifest = mirror.publish(FILES)
    half, go = threading.Event(), threading.Event()

    def pause(_: Digest) -> None:
        if mirror.requests >= _HALF:
            half.set()
            assert go.wait(60)

    mirror.on_request = pause
    with mirror.running():
        async with AsyncExitStack() as stack:
            daemons = [await stack.enter_async_context(_program(tmp_path, mirror, node).daemon()) for node in NODES]
            await _know_each_other(mirror)
            request = StageRequest(job_id="job", grant=mirror.grant(manifest))
            stages = [await one.client.stage(request) for one in daemons]
            await asyncio.to_thread(half.wait, 60)
            await daemons[1].kill()
            go.set()
            for daemon, stage in ((daemons[0], stages[0]), (daemons[2], stages[2])):
                ended = await daemon.client.stage_by_id(stage.id, 60)
                assert (ended.state, ended.error) == ("READY", None)
                assert tree(Path(ended.mounts[0].path)) == FILES
                assert ended.transfer is not None
                assert ended.transfer.bytes_hedged <= sum(map(len, FILES.values())) // 20
    assert sum(mirror.chunk_requests.values()) < 2 * len(mirror.chunk_requests)  # the dead one's share, and no more


def _program(root: Path, mirror: AgentMirror, node: str) -> Program:
    return Program(root / node, mirror.url, {"BDN_AGENT_NODE": node})


async def _know_each_other(mirror: AgentMirror) -> None:
    """Each has told the mirror that it knows the newest members."""
    async with asyncio.timeout(60):
        while {beat.node for beat in mirror.heartbeats if beat.epoch == mirror.epoch} != set(NODES):  # noqa: ASYNC110 - other processes: there is nothing to be notified by
            await asyncio.sleep(0.05)
