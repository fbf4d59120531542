"""Pulls that are killed at each of their steps, at a new directory and at a mount point: the next one goes on."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from bdn.core.layout import Manifest
from tests.support.agent.destination import Site
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.mounts import may_mount, mounted_tmpfs
from tests.support.agent.rig import Rig
from tests.support.content.noise import MIB
from tests.support.content.trees import tree
from tests.support.crash.killing_steps import Fuse, dies_at

OLD = {"config.json": b"{}", "a/old": b"old", "a/both": b"old both", "b": b"a file", "c/d/e": b"deep"}
NEW = {"config.json": b"{}", "a/new": b"new", "a/both": b"new both", "b/c": b"in a folder", "c/d": b"a file now"}
STRIDE = 37  # steps between two kills of an agent
kinds = pytest.mark.parametrize("is_mount_point", [False, True], ids=["directory", "mount point"])


@pytest.fixture
def place(tmp_path: Path, is_mount_point: bool) -> Iterator[Path]:
    path = tmp_path / "here/model"
    if is_mount_point and not may_mount():
        pytest.skip("mounting is not permitted here (needs root)")
    with mounted_tmpfs(path, "1m") if is_mount_point else nullcontext():
        yield path


def visible(place: Path) -> dict[str, bytes]:
    """The files that a job would find."""
    found = tree(place) if place.is_dir() else {}
    return {path: content for path, content in found.items() if not path.startswith(".bdn-")}


def is_whole(place: Path) -> bool:
    """Whether all came, and only the agent's records say by whom."""
    return visible(place) == NEW and not list(place.glob(".bdn-*/journal"))


def empty(place: Path) -> None:
    for path in place.iterdir() if place.is_dir() else ():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@kinds
@pytest.mark.parametrize("is_update", [False, True], ids=["first", "update"])
def test_destination__killed_at_each_step__holds_whole_files_and_takes_the_next_view(
    tmp_path: Path, place: Path, is_update: bool
) -> None:
    site, fuse, step, is_dead = Site.at(tmp_path, OLD, NEW), Fuse.at(tmp_path / "fuse"), 0, True
    while is_dead:
        empty(place)
        earlier = site.publish(site.old) if is_update else None
        step += 1
        fuse.light(step, after=step % 2 == 0)

        def update(light: Callable[[], None]) -> None:
            light()
            site.publish(site.new, earlier)  # noqa: B023 - called before the next round

        is_dead = dies_at(fuse, update)

        found = visible(place)
        assert all(content in (OLD.get(path), NEW.get(path)) for path, content in found.items()), (step, found)
        if is_dead and not is_whole(place) and (earlier is not None or found == {}):
            site.check(earlier)
            site.publish(site.new, earlier, "stg_y")  # of another cache, which knows nothing of the other stage
            assert tree(place) == NEW, step
    assert step > len(OLD)


def pull(rig: Rig, manifest: Manifest, place: Path, light: Callable[[], None] = lambda: None) -> None:
    async def run() -> None:
        async with rig.agent() as agent:
            light()
            stage = await agent.pulls.begin(rig.mirror.grant(manifest), place)
            await agent.stages.finish(stage.record.id)

    asyncio.run(run())


@kinds
@pytest.mark.parametrize("is_update", [False, True], ids=["first", "update"])
@pytest.mark.parametrize("is_same", [False, True], ids=["another agent", "the same agent"])
def test_pull__killed_at_steps_of_it__is_resumed_by_the_next(
    tmp_path: Path, place: Path, is_update: bool, is_same: bool, is_mount_point: bool
) -> None:
    if not is_same and (is_update or not is_mount_point):
        pytest.skip("without its records an agent knows only of what was left unfinished inside a mount point")
    fuse, step, is_dead = Fuse.at(tmp_path / "fuse"), 1, True
    with AgentMirror(is_packed=True).running() as mirror:
        old, new = mirror.publish(OLD), mirror.publish(NEW)
        while is_dead:
            empty(place)
            rig = Rig(mirror, tmp_path / f"data-{step}", {"cache_bytes": 3 * MIB})
            if is_update:
                pull(rig, old, place)
            fuse.light(step, after=step % 2 == 0)
            is_dead = dies_at(fuse, partial(pull, rig, new, place))

            found = visible(place)
            assert all(content in (OLD.get(path), NEW.get(path)) for path, content in found.items()), (step, found)
            if not is_same:
                shutil.rmtree(rig.root)
            if is_same or not is_whole(place):
                pull(rig, new, place)
            assert tree(place) == NEW, step
            shutil.rmtree(rig.root, ignore_errors=True)
            step += STRIDE
