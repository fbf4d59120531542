"""An empty cache directory, as an agent has it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bdn.disk.direct import DirectWrites
from node_agent.disk.cache_directory import CacheDirectory, UnnamedBytes
from node_agent.disk.group_sync import GroupSync
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles


@pytest.fixture
def places(tmp_path: Path) -> Places:
    places = Places(tmp_path / "cache")
    places.make()
    return places


@pytest.fixture
def disk(places: Places) -> Iterator[CacheDirectory]:
    with GroupSync(places.root) as sync:
        yield CacheDirectory(places, WholeFiles(places), DirectWrites(), sync, UnnamedBytes(), is_rebooted=False)
