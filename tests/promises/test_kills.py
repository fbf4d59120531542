"""Pulls that are killed at each step, agents and mirrors that are killed at random, and two agents on one directory."""

import asyncio
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bdn.wire.stage_schema import StageDocument
from tests.doubles.hub import Hub
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.process import Daemon, Program
from tests.support.content.layouts import whole
from tests.support.content.noise import noise
from tests.support.content.trees import tree
from tests.support.crash.killing_cluster import NODES, Cluster, Kills
from tests.support.crash.killing_reader import reading
from tests.support.crash.killing_steps import Fuse
from tests.support.crash.mirror_scenario import fill, repositories
from tests.support.promises.tally import FULL, Tally, at_scale
from tests.support.services.commands import Finished, Shell

pytest_plugins = ("tests.support.agent.fixtures", "tests.support.mirror.fixtures")
SMALL = {f"small/{number}": bytes([number]) * 5000 for number in range(6)}


@pytest.mark.usefixtures("backend")
@pytest.mark.embedded(
    "what a killed pull had claimed in PostgreSQL is free after 15 s, and there are a hundred of them"
)
@pytest.mark.promise("commit-order", "whole-files")
def test_a_pull_killed_at_any_step_gives_whole_files_and_leaves_the_cache_whole(
    tmp_path: Path, hub: Hub, tally: Tally
) -> None:
    files = {"weights": noise(9 * 1024 * 1024, 1), "again/weights": noise(9 * 1024 * 1024, 1), **SMALL}
    hub.repo("org/model").commit(files)
    shell = Shell(tmp_path, {"HF_ENDPOINT": hub.url}, is_forked=True)
    fuse, cache = Fuse.at(tmp_path / "fuse"), shell.data / "cache/files"

    def pull(dest: str) -> Finished:
        return shell.run(*fuse.command("bdn.cli.main", "pull", "hf://org/model", dest))

    assert pull("first").code == 0
    begun = fuse.steps
    assert pull("second").code == 0
    for step in even_sample(fuse.steps - begun, at_scale(3, 100)):
        place, case = tmp_path / str(step), f"step {step}"
        fuse.light(step, after=step % 2 == 0)
        killed = pull(place.name)
        fuse.spare()
        assert killed.code in (0, -signal.SIGKILL), killed.err
        assert not place.exists() or tree(place) == files, case
        for path in cache.glob("*/[!.]*"):  # whatever the user does to the files there, these stay as they are
            assert (path.stat().st_nlink, content_digest(path)) == (1, path.name), case
        again = pull(f"{step}-again")
        assert (again.code, tree(tmp_path / f"{step}-again")) == (0, files), again.err
        assert not list(tmp_path.glob(".*.bdn-*")), case
        tally.add(scenarios=1, kills=killed.code != 0)
    assert tally.counts["kills"] > 1


def content_digest(path: Path) -> str:
    return whole(path.read_bytes()).digest.hex


def even_sample(total: int, count: int) -> list[int]:
    """One step out of each of ``count`` equal parts of all steps."""
    random = Random(20261122)
    return [random.randint(number * total // count + 1, (number + 1) * total // count) for number in range(count)]


# --- The state machine of a node's cache, killed at any call to the disk and opened again, ten thousand times on one directory ---
PROCESSES = 2


@pytest.mark.promise("commit-order", "leases", "space", "whole-files")
def test_ten_thousand_kills_lose_nothing_acknowledged_and_show_nothing_wrong(tally: Tally) -> None:
    cycles = at_scale(200, 10_000) // PROCESSES
    command = [sys.executable, "-m", "tests.support.crash.cache_kills"]
    running = [
        subprocess.Popen(
            [*command, str(seed), str(cycles)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        for seed in range(1, 1 + PROCESSES)
    ]
    try:
        outcomes: list[dict[str, Any]] = [json.loads(process.communicate(timeout=1100)[0]) for process in running]
    finally:
        for process in running:
            process.kill()
    for outcome in outcomes:
        counts = outcome["counts"]
        tally.add(
            **{name: counts.get(name, 0) for name in ("scenarios", "faults", "refused")}, restarts=counts["kills"]
        )
        lost = sum("is lost" in fault for fault in outcome["faults"])
        tally.add(lost=lost, wrong=len(outcome["faults"]) - lost)
        assert not outcome["faults"], f"seed {outcome['seed']}, cycle {outcome['cycles']}: {outcome['faults']}"
        assert outcome["cycles"] == cycles
        assert counts["ready"] > cycles / 10, "hardly anything was staged"


# --- A mirror and two agents of a ring are killed again and again while they mirror, stage, release, evict and collect, and jobs read ---


@pytest.mark.usefixtures("backend")
@pytest.mark.promise("whole-files", "commit-order", "collection")
@pytest.mark.parametrize("seed", range(5 if FULL else 1))
async def test_whatever_is_killed_when_readers_see_whole_files_alone_and_all_ends_well(
    tmp_path: Path, hub: Hub, tally: Tally, seed: int
) -> None:
    fill(hub)
    kills = Kills(at_scale(3, 60))
    cluster = Cluster(tmp_path, hub, Random(seed), kills)
    roots = [tmp_path / node / "cache/mounts" for node in NODES]
    with reading(roots, 3, repositories().values()) as seen:
        async with asyncio.TaskGroup() as group:
            group.create_task(cluster.lives_of_mirror())
            for node in NODES:
                group.create_task(cluster.lives_of_agent(node))
        await cluster.finish()
    assert not seen.wrong, f"{seen.wrong[:5]}"
    assert seen.files
    tally.add(scenarios=1, kills=kills.done)


# --- Two agents, as processes, on one cache directory: one has it, the other says who ---
FILES = {"weights": noise(300_000, 1), "config.json": b"{}"}


@pytest.fixture
def program(mirror: AgentMirror, tmp_path: Path) -> Program:
    cache = {"BDN_AGENT_CACHE_DIR": str(tmp_path / "cache"), "BDN_AGENT_CLUSTER_CACHE_BYTES": "0"}
    return Program(tmp_path / "first", mirror.url, cache)


async def ready(daemon: Daemon, mirror: AgentMirror, job: str) -> StageDocument:
    return await daemon.staged(job, mirror.grant(mirror.publish(FILES)))


def entries(root: Path) -> dict[str, tuple[int, int]]:
    """Every file of a cache, but for the journal of what its agent does meanwhile."""
    found = [path for path in root.rglob("*") if path.is_file() and "journal" not in path.parts]
    return {str(path.relative_to(root)): (path.stat().st_ino, path.stat().st_size) for path in found}


@pytest.mark.promise("leases", "whole-files")
async def test_a_second_agent_ends_and_names_the_first_which_is_unharmed(
    program: Program, mirror: AgentMirror, tmp_path: Path, tally: Tally
) -> None:
    async with program.daemon() as daemon:
        stage = await ready(daemon, mirror, "job")
        before = entries(tmp_path / "cache")
        others = [replace(program, root=tmp_path / f"second-{turn}") for turn in range(at_scale(1, 5))]
        for other in (*others, program):  # with a socket of its own, and with the same
            done = await asyncio.to_thread(other.run)
            assert done.returncode == 3, done.stderr
            told = f"error: cache directory {tmp_path / 'cache'} is in use by process {daemon.process.pid} [IN_USE]"
            assert told in done.stderr.splitlines()[-1], done.stderr
            assert entries(tmp_path / "cache") == before
            assert await daemon.client.ready()
            tally.add(scenarios=1, refused=1)
        assert tree(Path(stage.mounts[0].path)) == FILES
        assert (await daemon.client.stage_by_id(stage.id, 0)).state == "READY"
        await ready(daemon, mirror, "another-job")
