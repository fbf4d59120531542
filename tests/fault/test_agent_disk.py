"""A disk that is full, read-only or damaged fails one stage with its reason; the agent and its promises stay."""

import errno
from pathlib import Path

import pytest

from bdn.core.errors import BdnError, DiskFailedError
from bdn.wire.operation_schema import EvictCommand
from node_agent.fill.part import PartialFile
from tests.support.agent.mirror import AgentMirror, fresh_mirror, in_both_forms
from tests.support.agent.mounts import mounted_tmpfs, needs_mounts
from tests.support.agent.rig import Rig, disk_bytes, staged
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror

FILES = {"large": noise(17 * MIB + 3, 1), "small": b"small"}


@needs_mounts
async def test_a_disk_that_fills_up_meanwhile_fails_the_stage_and_leaves_nothing_uncounted(
    mirror: AgentMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"large": FILES["large"]}
    manifest, real = mirror.publish(files), PartialFile.open
    with mounted_tmpfs(tmp_path / "disk", "32m") as disk:
        rig = Rig(mirror, disk, {"cache_bytes": 30 * MIB})

        def late(part: PartialFile) -> None:
            (disk / "foreign").write_bytes(bytes(20 * MIB))  # the budget was enough a moment ago
            real(part)

        async with rig.agent(byte_threads=1) as agent:
            monkeypatch.setattr(PartialFile, "open", late)
            with pytest.raises(BdnError) as caught:
                await staged(agent, mirror, manifest)

            assert caught.value.code == "DISK_FAILED"
            assert "No space left on device; other data took 2" in str(caught.value)
            assert abs(float(str(caught.value.details()["others_bytes"])) - 20 * MIB) < MIB
            assert str(disk) in str(caught.value.details()["path"])
            ledger = agent.cache.index.ledger
            assert ledger.used_bytes == disk_bytes(rig.cache)
            assert ledger.reserved_bytes == 0
            monkeypatch.setattr(PartialFile, "open", real)
            (disk / "foreign").unlink()
            stage = await staged(agent, mirror, manifest)
            assert tree(Path(stage.mounts[0].path)) == files


@in_both_forms
async def test_an_eviction_that_stops_half_way_is_finished_by_the_next_start(
    mirror: AgentMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = mirror.publish({"one": noise(100, 1), "more": noise(100, 2)}), mirror.publish({"two": noise(100, 3)})
    rig = Rig(mirror, tmp_path)
    real = Path.unlink

    def failing(path: Path, missing_ok: bool = False) -> None:
        if path.parent.parent.name == "files":
            raise OSError(errno.EIO, "Input/output error", str(path))
        real(path, missing_ok=missing_ok)

    async with rig.agent() as agent:
        for manifest in (one, two):
            await agent.stages.release((await staged(agent, mirror, manifest, job=str(manifest.digest))).id)
        monkeypatch.setattr(Path, "unlink", failing)
        with pytest.raises(DiskFailedError, match="Input/output error"):
            await agent.evictions.evict(EvictCommand(id="e", all=True))
        monkeypatch.setattr(Path, "unlink", real)

        # The record of the first was removed, so it is not held any more; the second was not touched.
        assert agent.cache.index.manifests() == (two.digest,)
        assert agent.cache.index.is_complete(two.digest)
    async with rig.agent() as agent:
        assert agent.cache.index.manifests() == (two.digest,)
        assert disk_bytes(rig.cache) == 100
