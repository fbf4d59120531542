"""Sandboxes that refuse a system call, as seccomp filters, gVisor and old kernels do: pulls use another way."""

import asyncio
import errno
from pathlib import Path

import pytest

from node_agent.disk.group_sync import FEW
from node_agent.job.tree import JobDirectory
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.crash.killing_steps import Fuse, dies_at
from tests.support.crash.refusing_kernel import CALLS, IS_KNOWN_MACHINE, refuse

SMALL = {f"a/{number}": b"%d" % number for number in range(FEW)}  # synced together
OLD = {"weights": noise(MIB, 1), **SMALL}
NEW = {"weights": noise(MIB, 2), **SMALL}


@pytest.mark.skipif(not IS_KNOWN_MACHINE, reason="numbers of system calls are known of x86_64 alone")
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
@pytest.mark.parametrize("calls", [*zip(CALLS), ("copy_file_range", "sendfile")], ids="+".join)
def test_pull__system_calls_refused__puts_the_files_there_and_replaces_them(
    tmp_path: Path, calls: tuple[str, ...], error: int
) -> None:
    place, other = tmp_path / "model", tmp_path / "other"
    with AgentMirror(is_packed=True).running() as mirror:
        old, new = mirror.publish(OLD), mirror.publish(NEW)
        rig = Rig(mirror, tmp_path / "data", {"cache_bytes": 5 * MIB})

        async def pull_all() -> None:
            async with rig.agent() as agent:
                for manifest, path in ((old, place), (old, other), (new, place)):
                    stage = await agent.pulls.begin(mirror.grant(manifest), path)
                    await agent.stages.finish(stage.record.id)
                await agent.scrub.scrubber.settle(agent.cache.index.contents_of(old.digest))

        def pull(_: object) -> None:
            for call in calls:
                refuse(call, error)
            asyncio.run(pull_all())

        assert not dies_at(Fuse.at(tmp_path / "fuse"), pull)

    assert tree(place) == NEW
    assert tree(other) == OLD


@pytest.mark.skipif(not IS_KNOWN_MACHINE, reason="numbers of system calls are known of x86_64 alone")
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
@pytest.mark.parametrize("call", ["statx", "syncfs"])
def test_checkpoint__system_call_refused__its_files_are_seen_and_made_durable(
    tmp_path: Path, call: str, error: int
) -> None:
    directory, names = JobDirectory(tmp_path / "job", 100), [f"checkpoint-1/{number}" for number in range(FEW)]
    (directory.root / "checkpoint-1").mkdir(parents=True)
    for name in names:
        (directory.root / name).write_bytes(b"shard")

    def look(_: object) -> None:
        refuse(call, error)
        found = directory.look()
        assert sorted(found.files) == sorted(names), found.skipped
        assert directory.make_durable(found.files)

    assert not dies_at(Fuse.at(tmp_path / "fuse"), look)
