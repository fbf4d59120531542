"""A store belongs to one database: a mirror with another database is refused before it collects anything."""

from pathlib import Path

import pytest

from bdn.core.errors import InvalidRequestError
from bdn.mirror.app import adopt_store
from bdn.mirror.settings import MirrorSettings
from bdn.store.copying import StoreCopy
from bdn.store.directory import DirectoryStore
from tests.contract.test_copied_stores import nothing_shown
from tests.doubles.hub import Hub
from tests.support.mirror.service import mirror_under_test, source

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = [pytest.mark.usefixtures("upstreams"), pytest.mark.embedded("is about a directory of chunks")]
MODEL = source("hf://org/model")
TREE = {"a.txt": b"12345"}


@pytest.fixture
def store(hub: Hub, tmp_path: Path) -> str:
    hub.repo("org/model").commit(TREE)
    return f"file://{tmp_path}/store"


async def test_start__store_of_another_database__is_refused_and_keeps_its_chunks(tmp_path: Path, store: str) -> None:
    async with mirror_under_test(tmp_path / "one", store=store) as mirror:
        manifest = await mirror.manifest(MODEL)
    with pytest.raises(InvalidRequestError, match=r"belongs to another mirror database.*bdn-admin store adopt"):
        async with mirror_under_test(tmp_path / "two", store=store) as mirror:
            await mirror.collect(grace_seconds=0)
    async with mirror_under_test(tmp_path / "one", store=store) as mirror:
        await mirror.collect(grace_seconds=0)
        assert await mirror.tree(manifest) == TREE


async def test_adopt__store_of_a_lost_database__belongs_to_this_one(tmp_path: Path, store: str) -> None:
    async with mirror_under_test(tmp_path / "lost", store=store) as mirror:
        await mirror.ready(MODEL)
    settings = MirrorSettings(data_dir=tmp_path / "new", store=store)
    before, owner = await adopt_store(settings)
    assert before != owner
    assert await adopt_store(settings) == (owner, owner)
    async with mirror_under_test(tmp_path / "new", store=store) as mirror:
        assert await mirror.tree(await mirror.manifest(MODEL)) == TREE
    with pytest.raises(InvalidRequestError, match="belongs to another mirror database"):
        async with mirror_under_test(tmp_path / "lost", store=store):
            pass


async def test_copied_store__started_with_the_same_database__belongs_to_it(tmp_path: Path, store: str) -> None:
    async with mirror_under_test(tmp_path / "one", store=store) as mirror:
        manifest = await mirror.manifest(MODEL)
    copy = DirectoryStore(tmp_path / "copy")
    await StoreCopy(DirectoryStore(tmp_path / "store"), copy, nothing_shown).run(dry_run=False)
    assert copy.owner() is None
    async with mirror_under_test(tmp_path / "one", store=f"file://{tmp_path}/copy") as mirror:
        assert await mirror.tree(manifest) == TREE
    assert copy.owner() == DirectoryStore(tmp_path / "store").owner()
