"""A disk that is full, read-only or damaged fails one stage with its reason; the agent and its promises stay."""

from pathlib import Path

import pytest

from bdn.core.errors import BdnError
from node_agent.fill.part import PartialFile
from tests.support.agent.mirror import AgentMirror, fresh_mirror
from tests.support.agent.mounts import mounted_tmpfs, needs_mounts
from tests.support.agent.rig import Rig, disk_bytes, staged
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror

FILES = {"large": noise(17 * MIB + 3, 1)}


@needs_mounts
async def test_a_disk_that_fills_up_meanwhile_fails_the_stage_and_leaves_nothing_uncounted(
    mirror: AgentMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, real = mirror.publish(FILES), PartialFile.open
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
            assert tree(Path(stage.mounts[0].path)) == FILES
