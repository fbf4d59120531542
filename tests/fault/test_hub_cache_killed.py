"""Pulls into the cache of the hub's client that are killed at each of their steps: no part is taken for the whole."""

from collections.abc import Callable
from pathlib import Path

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
