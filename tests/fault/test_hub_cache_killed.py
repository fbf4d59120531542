"""Pulls into the cache of the hub's client, and stages in its form, killed at each of their steps: no part is the whole."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from node_agent.stage.view.hub_folder import HubCommit, HubFolder
from node_agent.stage.view.views import Views
from tests.support.agent.cache import whole_files
from tests.support.agent.hub_place import COMMIT, FILES, HubPlace
from tests.support.crash.killing_steps import Fuse, dies_at


def test_hub_cache__killed_at_each_step__is_whole_or_reported_and_the_next_pull_goes_on(tmp_path: Path) -> None:
    fuse, step, is_dead, incomplete = Fuse.at(tmp_path / "fuse"), 0, True, 0
    while is_dead:
        step += 1
        place = HubPlace(tmp_path / str(step))
        fuse.light(step, after=step % 2 == 0)

        def pull(light: Callable[[], None], place: HubPlace = place) -> None:
            light()
            place.pull()

        is_dead = dies_at(fuse, pull)

        by_branch, by_commit = place.offline(), place.offline(COMMIT)
        assert all(found in (None, FILES) for found in (by_branch, by_commit)), (step, by_branch, by_commit)
        incomplete += by_commit is None
        place.restart()
        place.pull()
        assert place.offline() == FILES, step
    assert (step > len(FILES), incomplete > len(FILES)) == (True, True)


@pytest.mark.promise("whole-files")
def test_hub_view__killed_at_each_step__is_whole_or_absent_and_the_next_agent_builds_it(tmp_path: Path) -> None:
    fuse, step, is_dead = Fuse.at(tmp_path / "fuse"), 0, True
    while is_dead:
        step += 1
        place = HubPlace(tmp_path / str(step))
        place.list()
        kept = place.repository.tree(COMMIT)
        folder = HubFolder((HubCommit(place.repository, COMMIT, place.manifest, kept),))
        shown = {f"/{place.repository.folder.name}": folder}
        root = place.places.mounts / "stg_x" / place.repository.folder.name
        fuse.light(step, after=step % 2 == 0)

        def stage(light: Callable[[], None], views: Views, shown: dict[str, HubFolder]) -> None:
            light()
            views.publish("stg_x", shown, threading.Event())

        is_dead = dies_at(fuse, partial(stage, views=Views(place.files, "none"), shown=shown))

        place.root = root.parent  # where the client looks from now on
        assert place.offline() == (FILES if root.is_dir() else None), step
        was_whole = root.is_dir()
        Views(place.files, "none").drop_others(frozenset({"stg_x"}))
        place.files = whole_files(place.places)  # as an agent trusts the cache once it has verified what changed
        views = Views(place.files, "none")
        if not was_whole:
            views.publish("stg_x", shown, threading.Event())
        assert (views.is_intact("stg_x", shown), place.offline()) == (True, FILES), step
        views.drop("stg_x", shown)
        assert not list(place.places.mounts.iterdir()), step
    assert step > 4 * len(FILES)
