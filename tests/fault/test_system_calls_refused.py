"""Sandboxes that refuse a system call, as seccomp filters, gVisor and old kernels do: pulls use another way."""

import asyncio
import errno
from pathlib import Path

import pytest

from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import MIB, Rig, noise
from tests.support.content.trees import tree
from tests.support.crash.killing_steps import Fuse, dies_at
from tests.support.crash.refusing_kernel import CALLS, IS_KNOWN_MACHINE, refuse

OLD = {"config.json": b"{}", "weights": noise(MIB, 1), "a/small": b"small"}
NEW = {"config.json": b"{}", "weights": noise(MIB, 2), "a/small": b"small"}


@pytest.mark.skipif(not IS_KNOWN_MACHINE, reason="numbers of system calls are known of x86_64 alone")
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
@pytest.mark.parametrize("call", CALLS)
def test_pull__one_system_call_refused__puts_the_files_there_and_replaces_them(
    tmp_path: Path, call: str, error: int
) -> None:
    place, other = tmp_path / "model", tmp_path / "other"
    with AgentMirror(is_packed=True).running() as mirror:
        old, new = mirror.publish(OLD), mirror.publish(NEW)
        rig = Rig(mirror, tmp_path / "data", {"cache_bytes": 5 * MIB})

        async def pull_all() -> None:
            async with rig.agent() as agent:
                for manifest, path in ((old, place), (old, other), (new, place)):
                    stage = await agent.stages.pull(mirror.grant(manifest), path)
                    await agent.stages.finish(stage.record.id)
                await agent.scrub.scrubber.settle(agent.cache.index.contents_of(old.digest))

        def pull(_: object) -> None:
            refuse(call, error)
            asyncio.run(pull_all())

        assert not dies_at(Fuse.at(tmp_path / "fuse"), pull)

    assert tree(place) == NEW
    assert tree(other) == OLD
