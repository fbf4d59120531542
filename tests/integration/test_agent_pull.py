"""Views at directories of the user's choice, published by an embedded agent."""

# ruff: noqa: ASYNC240 - a test's loop serves no other clients

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path

import pytest

from bdn.core.errors import InvalidRequestError
from bdn.core.layout import Manifest
from bdn.wire.operation_schema import EvictCommand
from bdn.wire.shapes import ReportedError
from bdn.wire.stage_schema import StageDocument, StageMount
from node_agent.app import Agent
from node_agent.stage.standing import standing_pull
from node_agent.stage.view import build
from tests.support.agent.mirror import AgentMirror, fresh_mirror, in_both_forms
from tests.support.agent.mounts import mounted_tmpfs, needs_mounts
from tests.support.agent.rig import Rig, at_rest, staged
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.crash.scripted_writes import failing

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror
pytestmark = in_both_forms

OLD, NEW = {"config.json": b"{}", "weights": noise(MIB, 1)}, {"config.json": b"{}", "weights": noise(MIB, 2)}


@pytest.fixture
def rig(mirror: AgentMirror, tmp_path: Path) -> Rig:
    return Rig(mirror, tmp_path / "data", {"cache_bytes": 3 * MIB})


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "models/one"


async def pulled(
    agent: Agent, mirror: AgentMirror, manifest: Manifest, dest: Path, *, link: bool = False
) -> StageDocument:
    stage = await agent.pulls.begin(mirror.grant(manifest), dest, link=link)
    return await agent.stages.finish(stage.record.id)


def is_leased(agent: Agent, manifest: Manifest) -> bool:
    return agent.cache.index.leases.is_leased(manifest.digest)


@pytest.mark.parametrize("link", [False, True])
async def test_a_pull_puts_the_files_at_the_directory_and_shares_them_with_the_cache_only_if_asked(
    rig: Rig, mirror: AgentMirror, dest: Path, link: bool
) -> None:
    manifest = mirror.publish(OLD)
    async with rig.agent() as agent:
        stage = await pulled(agent, mirror, manifest, dest, link=link)

        assert tree(dest) == OLD
        assert (stage.job_id, stage.mounts[0].path, stage.mounts[0].exposure) == (f"pull:{dest}", str(dest), "none")
        assert (stage.mounts[0].view == "hardlink") == link
        own = {agent.places.file(entry.digest): dest / entry.path for entry in manifest.files}
        assert [path.exists() and path.samefile(shown) for path, shown in own.items()] == [link] * len(own)
        assert is_leased(agent, manifest)


async def test_a_pull_without_links_replaces_one_with_links(rig: Rig, mirror: AgentMirror, dest: Path) -> None:
    manifest = mirror.publish(OLD)
    async with rig.agent() as agent:
        for link in (True, False, True):
            await pulled(agent, mirror, manifest, dest, link=link)
            assert tree(dest) == OLD
            assert (dest / manifest.files[0].path).stat().st_nlink == 1 + link


def edit(path: Path, *, hides: bool) -> None:
    """Change a byte in place, as root may; who hides it sets the time back."""
    before = path.stat()
    path.chmod(0o644)
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(bytes([content[0] ^ 1]))
    path.chmod(0o444)
    if hides:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("hides", [False, True], ids=["edited", "edited-and-hidden"])
async def test_what_was_edited_through_a_link_is_not_pulled_again(
    rig: Rig, mirror: AgentMirror, dest: Path, hides: bool, restarts: bool
) -> None:
    manifest = mirror.publish(OLD)
    async with AsyncExitStack() as stack:
        agent = await stack.enter_async_context(rig.agent())
        await pulled(agent, mirror, manifest, dest, link=True)
        if restarts:
            await stack.aclose()
        edit(dest / "weights", hides=hides)
        if restarts:
            agent = await stack.enter_async_context(rig.agent())

        for link in (False, True):
            await pulled(agent, mirror, manifest, dest.with_name(f"other-{link}"), link=link)
            assert tree(dest.with_name(f"other-{link}")) == OLD
        assert tree(dest) == OLD  # it was repaired in place
        assert list(agent.places.quarantine.glob("*.bytes"))


async def test_links_that_others_remove_cost_a_look_and_no_request(rig: Rig, mirror: AgentMirror, dest: Path) -> None:
    manifest = mirror.publish(OLD)
    async with rig.agent() as agent:
        await pulled(agent, mirror, manifest, dest, link=True)
        shutil.rmtree(dest)
        mirror.forget()
        await pulled(agent, mirror, manifest, dest, link=True)
        assert tree(dest) == OLD
        assert mirror.requests == 0


async def test_the_same_pull_again_returns_at_once_and_reads_no_file(
    rig: Rig, mirror: AgentMirror, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = mirror.publish(OLD)
    async with rig.agent() as agent:
        await pulled(agent, mirror, manifest, dest)
        inode = dest.stat().st_ino
    mirror.forget()
    monkeypatch.setattr(build, "digest_of", failing(errno.EIO))
    async with rig.agent() as agent:
        assert is_leased(agent, manifest)
        stage = await agent.pulls.begin(mirror.grant(manifest), dest)
        assert stage.record.state == "READY"  # at once
        assert dest.stat().st_ino == inode
        assert (mirror.requests, mirror.documents) == (0, {})


async def test_a_changed_source_replaces_the_view_and_its_lease(rig: Rig, mirror: AgentMirror, dest: Path) -> None:
    old, new = mirror.publish(OLD), mirror.publish(NEW)
    async with rig.agent() as agent:
        first = await pulled(agent, mirror, old, dest)
        await pulled(agent, mirror, new, dest)
        await at_rest(agent.stages.registry)

        assert tree(dest) == NEW
        assert (is_leased(agent, old), is_leased(agent, new)) == (False, True)
        assert agent.stages.registry.find(first.id).record.state == "RELEASED"
        await pulled(agent, mirror, old, dest)  # and back
        assert tree(dest) == OLD


async def test_what_the_user_wrote_into_the_view_is_not_lost(rig: Rig, mirror: AgentMirror, dest: Path) -> None:
    old, new = mirror.publish(OLD), mirror.publish(NEW)
    async with rig.agent() as agent:
        await pulled(agent, mirror, old, dest)
        (dest / "notes.txt").write_bytes(b"mine")
        for manifest in (old, new):
            with pytest.raises(InvalidRequestError, match=r"'notes\.txt', which did not come from bdn"):
                await pulled(agent, mirror, manifest, dest)

        assert (dest / "notes.txt").read_bytes() == b"mine"
        assert is_leased(agent, old)  # the directory still holds it


@pytest.mark.parametrize("moment", ["at the start", "when room is needed", "before an eviction", "by housekeeping"])
async def test_a_directory_that_is_gone_holds_no_lease(rig: Rig, mirror: AgentMirror, dest: Path, moment: str) -> None:
    manifest, large = mirror.publish(OLD), mirror.publish({"large": noise(3 * MIB, 5)})
    async with rig.agent() as agent:
        await pulled(agent, mirror, manifest, dest)
        dest.rename(dest.with_name("elsewhere"))
        if moment == "when room is needed":
            await staged(agent, mirror, large)
        elif moment == "before an eviction":
            items = await agent.evictions.evict(EvictCommand(id="e", all=True))
            assert not any(item.refused for item in items)
        elif moment == "by housekeeping":
            await agent.housekeeping.reap()
        if moment != "at the start":
            assert not is_leased(agent, manifest)
    async with rig.agent() as agent:
        assert not is_leased(agent, manifest)
        assert tree(dest.with_name("elsewhere")) == OLD


async def test_releasing_a_pull_leaves_the_directory_to_its_user(rig: Rig, mirror: AgentMirror, dest: Path) -> None:
    manifest = mirror.publish(OLD)
    async with rig.agent() as agent:
        stage = await pulled(agent, mirror, manifest, dest)

        await agent.evictions.evict(EvictCommand(id="e", all=True, force=True))

        assert agent.stages.registry.find(stage.id).record.state == "RELEASED"
        assert tree(dest) == OLD
        await pulled(agent, mirror, manifest, dest)  # fetched again, and found to be ours
        assert tree(dest) == OLD


async def test_a_pull_that_was_interrupted_stays_interrupted(rig: Rig, mirror: AgentMirror, dest: Path) -> None:
    manifest = mirror.publish({"large": noise(20 * MIB, 7)})
    rig.given["cache_bytes"] = 30 * MIB
    has_ended, asked = mirror.hold(mirror.chunks(manifest, "large")[1])
    async with rig.agent(byte_threads=1) as agent:
        stage = await agent.pulls.begin(mirror.grant(manifest), dest)
        await asked.wait()
    has_ended.set()
    mirror.forget()
    async with rig.agent(byte_threads=1) as agent:
        assert agent.stages.registry.find(stage.record.id).record.state == "RELEASED"
        assert mirror.requests == 0
        assert not dest.exists()

        again = await pulled(agent, mirror, manifest, dest)

        assert tree(dest) == {"large": noise(20 * MIB, 7)}
        assert again.mounts[0].bytes_from.node >= 8 * MIB  # from the bitmap of the interrupted pull
        assert mirror.requests <= 2


async def test_a_pull_takes_one_source(rig: Rig, mirror: AgentMirror, dest: Path) -> None:
    token = mirror.grant(mirror.publish(OLD), mirror.publish(NEW))
    async with rig.agent() as agent:
        with pytest.raises(InvalidRequestError, match="one source, not for 2"):
            await agent.pulls.begin(token, dest)


async def test_a_relative_directory_is_meant_from_where_the_caller_stands(
    rig: Rig, mirror: AgentMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with rig.agent() as agent:
        stage = await pulled(agent, mirror, mirror.publish(OLD), Path("model"))

        assert stage.mounts[0].path == str(tmp_path / "model")
        assert tree(tmp_path / "model") == OLD


@needs_mounts
async def test_a_pull_to_another_file_system_is_a_copy(rig: Rig, mirror: AgentMirror, tmp_path: Path) -> None:
    manifest = mirror.publish(OLD)
    with mounted_tmpfs(tmp_path / "other", "8m") as other:
        async with rig.agent() as agent:
            stage = await pulled(agent, mirror, manifest, other / "model")
            assert stage.mounts[0].view == "copy"
            assert "Invalid cross-device link" in (stage.mounts[0].view_reason or "")
            again = await agent.pulls.begin(mirror.grant(manifest), other / "model")
            assert (again.record.id, again.record.state) == (stage.id, "READY")
            assert tree(other / "model") == OLD


@needs_mounts
@pytest.mark.parametrize("is_leased", [False, True])
async def test_copies__disk_is_full_of_other_cached_files__evict_those_without_a_lease(
    mirror: AgentMirror, tmp_path: Path, is_leased: bool
) -> None:
    old, new = {"old": noise(7 * MIB, 8)}, {"new": noise(3 * MIB, 9)}
    first, second = mirror.publish(old), mirror.publish(new)
    with mounted_tmpfs(tmp_path / "disk", "12m") as disk:
        async with Rig(mirror, disk / "data", {"headroom_bytes": 0}).agent() as agent:
            stage = await staged(agent, mirror, first)
            if not is_leased:
                await agent.stages.release(stage.id)
            with pytest.raises(ReportedError, match="disk failed") if is_leased else nullcontext():
                await pulled(agent, mirror, second, disk / "model")
            assert agent.cache.index.is_complete(first.digest) == is_leased
            assert {path.name for path in disk.iterdir()} == ({"data"} if is_leased else {"data", "model"})
            assert is_leased or tree(disk / "model") == new


# --- looked at without an agent ---


def looked_at(rig: Rig, manifest: Manifest, dest: Path, *, link: bool = False) -> StageMount | None:
    return standing_pull(rig.root, "org", "/m0", str(manifest.digest), dest, link=link)


@pytest.mark.parametrize("link", [False, True])
async def test_what_stands_is_told_as_an_agent_tells_it_whether_one_runs_or_not(
    rig: Rig, mirror: AgentMirror, dest: Path, link: bool
) -> None:
    manifest = mirror.publish(OLD)
    async with rig.agent() as agent:
        await pulled(agent, mirror, manifest, dest, link=link)
        (told,) = (await pulled(agent, mirror, manifest, dest, link=link)).mounts
        beside = looked_at(rig, manifest, dest, link=link)
    alone = looked_at(rig, manifest, dest, link=link)

    size = manifest.bytes_total
    assert alone == beside
    assert beside is not None
    assert beside == told.model_copy(update={"bytes_from": beside.bytes_from})
    assert beside.bytes_from.model_dump() == {"node": size, "cluster": 0, "mirror": 0}


async def test_a_look_counts_as_a_use(rig: Rig, mirror: AgentMirror, dest: Path) -> None:
    manifest, other = mirror.publish(OLD), mirror.publish(NEW)
    async with rig.agent() as agent:
        await pulled(agent, mirror, manifest, dest)
        await pulled(agent, mirror, other, dest.with_name("other"))
    assert looked_at(rig, manifest, dest)
    async with rig.agent() as agent:
        assert list(agent.cache.index.recency.oldest_first()) == [other.digest, manifest.digest]


def record(rig: Rig, **changes: object) -> None:
    (path,) = (rig.cache / "stages").glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


def cut(rig: Rig) -> None:
    (path,) = (rig.cache / "stages").glob("*.json")
    path.write_bytes(path.read_bytes()[:-9])


def roots(rig: Rig) -> list[Path]:
    return [folder / folder.name for folder in (rig.cache / "manifests").iterdir()]


def swapped(dest: Path) -> None:
    shutil.copytree(dest, dest.with_name("copy"))
    shutil.rmtree(dest)
    dest.with_name("copy").rename(dest)


CHANGES: dict[str, Callable[[Rig, Path], object]] = {
    "a-file-is-gone": lambda _, dest: (dest / "config.json").unlink(),
    "a-file-came": lambda _, dest: (dest / "mine").write_bytes(b""),
    "a-file-was-edited": lambda _, dest: edit(dest / "config.json", hides=False),
    "the-directory-is-a-copy": lambda _, dest: swapped(dest),
    "the-directory-is-gone": lambda _, dest: shutil.rmtree(dest),
    "the-record-is-cut-off": lambda rig, _: cut(rig),
    "the-record-is-of-a-stage-that-failed": lambda rig, _: record(rig, state="FAILED"),
    "the-record-is-of-another-directory": lambda rig, dest: record(rig, destination=f"{dest}x"),
    "the-record-is-of-another-stage": lambda rig, _: record(rig, id="stg_0"),
    "the-record-names-another-manifest": lambda rig, _: record(
        rig, mounts=[{"mount_location": "/m0", "manifest": f"b3:{0:064}", "source": "hf://org/model"}]
    ),
    "the-record-is-older": lambda rig, _: record(rig, inode=None),
    "the-manifest-is-gone": lambda rig, _: [*map(os.unlink, roots(rig))],
    "the-manifest-is-damaged": lambda rig, _: [path.write_bytes(path.read_bytes() + b" ") for path in roots(rig)],
    "the-cache-is-of-another-version": lambda rig, _: (rig.cache / "format").write_bytes(b"another\n"),
    "the-cache-is-gone": lambda rig, _: shutil.rmtree(rig.cache),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_where_anything_is_not_as_it_was_left_an_agent_has_to_look(
    rig: Rig, mirror: AgentMirror, dest: Path, change: Callable[[Rig, Path], object]
) -> None:
    manifest = mirror.publish(OLD)
    async with rig.agent() as agent:
        await pulled(agent, mirror, manifest, dest)
    assert looked_at(rig, manifest, dest)
    assert looked_at(rig, manifest, dest, link=True) is None
    assert looked_at(rig, manifest, dest.with_name("elsewhere")) is None
    assert looked_at(rig, mirror.publish(NEW), dest) is None

    change(rig, dest)

    assert looked_at(rig, manifest, dest) is None
