"""Stages with the view ``hub``: a repository as the cache of the hub's client has it, built and kept by an agent."""

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.errors import IncompleteSnapshotError

from bdn.core.errors import InvalidRequestError
from bdn.core.layout import Manifest
from bdn.wire.shapes import ReportedError
from bdn.wire.stage_schema import StageDocument, StageRequest
from node_agent.app import Agent
from tests.support.agent.hub_place import COMMIT, hub_files
from tests.support.agent.mirror import AgentMirror, fresh_mirror
from tests.support.agent.process import Program
from tests.support.agent.rig import Rig, at_rest
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror
FILES: Final = {
    "config.json": b"{}",
    "model.safetensors": noise(MIB, 1),
    "same.safetensors": noise(MIB, 1),
    "a/b/deep.txt": b"deep",
    "empty.txt": b"",
}
NEWER: Final = "decade" + "0" * 34
NEW_FILES: Final = {**FILES, "config.json": b'{"new": 1}'}
MAIN: Final = f"hf://org/model#{COMMIT}"
BRANCH: Final = f"hf://org/model@refs/pr/1#{NEWER}"


@pytest.fixture
def strict_umask() -> Iterator[None]:
    """The agent's umask hides its files from other users; a view must be readable for jobs of other users."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def rig(mirror: AgentMirror, tmp_path: Path) -> Rig:
    return Rig(mirror, tmp_path / "data")


def commit(mirror: AgentMirror, name: str, listed: Mapping[str, bytes], files: Mapping[str, bytes]) -> Manifest:
    """A mirrored selection of a commit. ``name``: the requested source, ``#``, the commit."""
    source, _, commit = name.partition("#")
    mirror.hub_trees[f"{source.partition('@')[0]}@{commit}"] = hub_files(listed)
    return mirror.publish(files)


async def shown(agent: Agent, mirror: AgentMirror, commits: Mapping[str, Manifest], job: str = "job") -> StageDocument:
    stage = await agent.stages.start(job, mirror.grant(commits=commits), view="hub")
    async with asyncio.timeout(30):
        return await agent.stages.finish(stage.record.id)


def folder(stage: StageDocument) -> Path:
    return Path(stage.mounts[0].path)


def offline(stage: StageDocument, root: Path, revision: str | None = None) -> dict[str, bytes]:
    """What the client finds in a cache that has the shown folder under its name."""
    root.mkdir(exist_ok=True)
    (root / folder(stage).name).unlink(missing_ok=True)
    (root / folder(stage).name).symlink_to(folder(stage))
    return tree(Path(snapshot_download("org/model", revision=revision, cache_dir=root, local_files_only=True)))


@pytest.mark.usefixtures("strict_umask")
@pytest.mark.parametrize("exposure", ["none", "symlink"])
async def test_hub_view__of_a_commit__is_what_the_client_needs_and_no_more(
    rig: Rig, mirror: AgentMirror, tmp_path: Path, exposure: str
) -> None:
    whole = commit(mirror, MAIN, FILES, FILES)
    async with rig.agent(exposure=exposure) as agent:
        stage = await shown(agent, mirror, {MAIN: whole})

        assert (stage.view, stage.mounts[0].commit, folder(stage).name) == ("hub", COMMIT, "models--org--model")
        assert {path.name for path in folder(stage).iterdir()} == {"blobs", "refs", "snapshots", "trees"}
        assert (folder(stage) / "refs/main").read_text() == COMMIT
        assert [offline(stage, tmp_path / "hub", name) for name in (None, "main", COMMIT)] == [FILES] * 3
        assert len(list((folder(stage) / "blobs").iterdir())) == len(set(FILES.values()))
        shown_to_others = [path for path in (folder(stage), *folder(stage).rglob("*")) if path.stat().st_mode & 0o004]
        assert len(shown_to_others) == len([*folder(stage).rglob("*")]) + 1
        assert agent.cache.files.whole.changed(whole.contents) == []


async def test_hub_view__of_two_commits__is_one_folder_whose_commits_share_blobs(
    rig: Rig, mirror: AgentMirror, tmp_path: Path
) -> None:
    old, new = commit(mirror, MAIN, FILES, FILES), commit(mirror, BRANCH, NEW_FILES, NEW_FILES)
    async with rig.agent() as agent:
        stage = await shown(agent, mirror, {MAIN: old, BRANCH: new})

        assert len({mount.path for mount in stage.mounts}) == 1
        assert offline(stage, tmp_path / "hub") == FILES
        assert offline(stage, tmp_path / "hub", "refs/pr/1") == offline(stage, tmp_path / "hub", NEWER) == NEW_FILES
        contents = set(FILES.values()) | set(NEW_FILES.values())
        assert len(list((folder(stage) / "blobs").iterdir())) == len(contents)

        await agent.stages.release(stage.id)

        assert not folder(stage).exists()
        assert agent.cache.files.whole.changed([*old.contents, *new.contents]) == []


async def test_hub_view__of_a_selection__is_never_taken_for_the_whole(
    rig: Rig, mirror: AgentMirror, tmp_path: Path
) -> None:
    part = commit(mirror, MAIN, FILES, {"config.json": b"{}"})
    async with rig.agent() as agent:
        stage = await shown(agent, mirror, {MAIN: part})

        with pytest.raises(IncompleteSnapshotError, match="4 file"):
            offline(stage, tmp_path / "hub")


async def test_hub_view__without_a_listing_of_the_whole__is_not_built(rig: Rig, mirror: AgentMirror) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent() as agent:
        for listed, reason in ((None, "does not exist"), ({"other": b""}, r"lacks '")):
            if listed is not None:
                commit(mirror, MAIN, listed, FILES)
            with pytest.raises(ReportedError, match=reason):
                await shown(agent, mirror, {MAIN: manifest})
            assert not [path for path in (rig.cache / "mounts").rglob("*") if path.is_file()]
            assert agent.cache.files.whole.changed(manifest.contents) == []
        commit(mirror, MAIN, FILES, FILES)
        await shown(agent, mirror, {MAIN: manifest})  # a listing that was wrong is requested again


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("s3://bucket/model", "s3://bucket/model is not a repository of a hub"),
        ("bt://llama@job1/checkpoint-1", "is not a repository of a hub"),
        ("hf://buckets/org/bucket", "is not a repository of a hub"),
        ("hf://org/model", "names no commit, because an older mirror signed it"),
        (f"hf://org/model@a//b#{COMMIT}", "no revision has a segment"),
    ],
)
async def test_hub_view__of_another_source__is_refused_before_anything_is_fetched(
    rig: Rig, mirror: AgentMirror, name: str, reason: str
) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent() as agent:
        with pytest.raises(InvalidRequestError) as refused:
            await agent.stages.start("job", mirror.grant(commits={name: manifest}), view="hub")

        assert reason in refused.value.message
        assert (agent.stages.registry.all(), mirror.requests) == ([], 0)


async def test_hub_view__of_the_same_files_of_another_commit__is_another_stage(rig: Rig, mirror: AgentMirror) -> None:
    manifest, name = commit(mirror, MAIN, FILES, FILES), f"hf://org/model#{NEWER}"
    commit(mirror, name, FILES, FILES)
    async with rig.agent() as agent:
        first = await shown(agent, mirror, {MAIN: manifest})
        again = await shown(agent, mirror, {MAIN: manifest})
        other = await shown(agent, mirror, {name: manifest})
        files = await agent.stages.start("job", mirror.grant(commits={MAIN: manifest}))

        assert first.id == again.id
        assert len({first.id, other.id, files.record.id}) == 3
        assert (folder(other) / "refs/main").read_text() == NEWER
        assert mirror.documents["/trees"] == 2 * len(FILES)


async def test_hub_view__of_several_jobs_at_once__requests_the_listing_once(rig: Rig, mirror: AgentMirror) -> None:
    manifest = commit(mirror, MAIN, FILES, FILES)
    async with rig.agent() as agent:
        stages = await asyncio.gather(*(shown(agent, mirror, {MAIN: manifest}, f"job-{turn}") for turn in range(8)))

        assert {tree(folder(stage) / "snapshots" / COMMIT) == FILES for stage in stages} == {True}
        assert mirror.documents["/trees"] == len(FILES)


async def test_hub_view__of_an_agent_that_was_killed_while_it_staged__is_resumed(
    mirror: AgentMirror, tmp_path: Path
) -> None:
    program, manifest = Program(tmp_path / "node", mirror.url), commit(mirror, MAIN, FILES, FILES)
    request = StageRequest(job_id="job", grant=mirror.grant(commits={MAIN: manifest}), view="hub")
    gate, asked = mirror.hold()
    async with program.daemon() as daemon:
        begun = await daemon.client.stage(request)
        await asked.wait()
        await daemon.kill()
    gate.set()
    mirror.every = None
    async with program.daemon() as daemon:
        stage = await daemon.ended(await daemon.client.stage_by_id(begun.id))
        assert (stage.state, stage.view, stage.error) == ("READY", "hub", None)
        assert offline(stage, tmp_path / "hub") == FILES
        await daemon.kill()
    mirror.down = True
    async with program.daemon() as daemon:
        again = await daemon.ended(await daemon.client.stage_by_id(begun.id))
        assert (again.state, again.error) == ("READY", None)
        assert offline(again, tmp_path / "hub") == FILES


async def test_hub_view__of_a_restarted_agent__is_left_as_it_is_and_mended_without_the_mirror(
    rig: Rig, mirror: AgentMirror, tmp_path: Path
) -> None:
    manifest = commit(mirror, MAIN, FILES, FILES)
    async with rig.agent() as agent:
        stage = await shown(agent, mirror, {MAIN: manifest})
    mirror.down = True
    inode = (folder(stage) / "refs/main").stat().st_ino
    async with rig.agent() as agent:
        await at_rest(agent.stages.registry)
        assert (folder(stage) / "refs/main").stat().st_ino == inode
    for spoil in ("refs/main", f"trees/{COMMIT}.json", f"snapshots/{COMMIT}/empty.txt"):
        (folder(stage) / spoil).unlink()
        async with rig.agent() as agent:
            await at_rest(agent.stages.registry)
            assert agent.stages.registry.find(stage.id).record.error is None
            assert offline(stage, tmp_path / "hub") == FILES, spoil


async def test_hub_view__is_warmed_verified_repaired_and_found_by_path_like_other_stages(
    rig: Rig, mirror: AgentMirror
) -> None:
    manifest = commit(mirror, MAIN, FILES, FILES)
    (content,) = {entry.digest for entry in manifest.files if entry.path == "model.safetensors"}
    async with rig.agent() as agent:
        begun = await agent.stages.start("job", mirror.grant(commits={MAIN: manifest}), view="hub", warm=True)
        stage = await agent.stages.finish(begun.record.id)
        await at_rest(agent.stages.registry)
        snapshot, known = folder(stage) / "snapshots" / COMMIT, agent.stages.registry.find(stage.id)
        if known.warming and known.warming.task:
            await known.warming.task

        assert known.warming is not None
        assert (known.warming.state, known.warming.bytes_read) == ("WARM", sum(map(len, set(FILES.values()))))
        staged = agent.scrub.scrubber.repair.staged
        found = {file.entry.path for file in staged.find(str(folder(stage)))}
        assert found == FILES.keys() - {"same.safetensors"}  # the same blob
        assert [file.entry.path for file in staged.find(str(snapshot / "a/b/deep.txt"))] == ["a/b/deep.txt"]
        assert agent.stages.showing(PurePosixPath(snapshot / "a/b/deep.txt"))[2] == "a/b/deep.txt"
        assert agent.stages.showing(PurePosixPath(folder(stage)))[2] == "."

        cached, aside = agent.places.file(content), rig.root / "aside"
        earlier = cached.stat()
        aside.write_bytes(cached.read_bytes())
        agent.cache.files.whole.appear(content, aside)
        agent.scrub.scrubber.repair.relink(content, earlier)
        assert cached.samefile(snapshot / "model.safetensors")
