"""How much room a job gets for checkpoints when it names no size."""

import os
from pathlib import Path
from typing import cast

import pytest

from bdn.wire.job_schema import LEAST_BYTES
from node_agent.cache.node_cache import NodeCache
from node_agent.job.volume import VolumeSpace
from node_agent.settings import load_settings

GIB = 1024**3
BLOCK = 4096


@pytest.mark.parametrize(("size", "free", "wanted"), [
    (256 * GIB, 200 * GIB, 32 * GIB),
    (256 * GIB, 57 * GIB, 57 * GIB // 4),  # others fill the disk, and the weights need room beside the checkpoints
    (4096 * GIB, 4000 * GIB, 100 * GIB),
    (GIB, 0, LEAST_BYTES),
])  # fmt: skip
def test_checkpoints_without_a_size__get_a_share_of_the_disk_and_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int, free: int, wanted: int
) -> None:
    found = os.statvfs_result((BLOCK, BLOCK, size // BLOCK, free // BLOCK, free // BLOCK, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    space = VolumeSpace(cast(NodeCache, None), tmp_path, load_settings().headroom_of)
    assert space.default_checkpoint_bytes() == wanted
