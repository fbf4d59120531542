"""What a mirror stores on its disk, and other users of the machine."""

import os
from pathlib import Path

from tests.doubles.hub import Hub
from tests.support.mirror.service import mirror_under_test, source

pytest_plugins = ("tests.support.mirror.fixtures",)


async def test_other_users_of_the_machine_read_nothing_that_a_mirror_stores(
    upstreams: None, hub: Hub, tmp_path: Path
) -> None:
    hub.repo("org/one").commit({"one.txt": b"one"})
    before = os.umask(0o022)
    try:
        async with mirror_under_test(tmp_path / "data") as mirror:
            await mirror.ready(source("hf://org/one"))
            stored = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
            assert {"mirror.sqlite", "mirror.sqlite-wal"} < {path.name for path in stored}
            assert any("chunks" in path.parts for path in stored)
            assert [path for path in stored if is_open_to_others(path, tmp_path)] == []
    finally:
        os.umask(before)


def is_open_to_others(path: Path, above: Path) -> bool:
    """Another user may read the file, and may pass each folder between it and ``above``."""
    folders = [folder for folder in path.parents if above in folder.parents]
    return bool(path.stat().st_mode & 0o004) and all(folder.stat().st_mode & 0o001 for folder in folders)
