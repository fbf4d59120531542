"""What a job may write on a node, by the commands: bounded, reserved, pushed meanwhile, and gone when the job has ended."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bdn.disk.binding import mounts_below
from tests.doubles.hub import Hub
from tests.support.agent.mounts import needs_images, needs_mounts, unmounting
from tests.support.content.trees import tree
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Process, Shell, wait_until

MIB = 1024**2
SCRATCH = 64 * MIB


@pytest.fixture
def cluster(backend: str, tmp_path: Path) -> Iterator[Cluster]:
    with unmounting(tmp_path):
        cluster = Cluster(tmp_path, {})
        with cluster.mirror():
            yield cluster


@contextmanager
def node(cluster: Cluster, name: str = "node-1", **settings: str) -> Iterator[tuple[Shell, Process]]:
    """An agent whose jobs' directories are known soon."""
    shell = cluster.shell(name, BDN_AGENT_SETTLE_SECONDS="0", **settings)
    shell.root.mkdir(exist_ok=True)
    with shell.running("bdn-node-agent") as process:
        wait_until(lambda: shell.run("bdn", "volumes", "ls", "--json").code == 0, 240, "the agent's answer")
        yield shell, process


def created(shell: Shell, job: str = "job-1", *words: str) -> dict[str, Path]:
    """The environment, by the names without their beginning."""
    done = shell.told("bdn", "volumes", "create", "--job", job, "--scratch", f"{SCRATCH}", *words)
    return {name.removeprefix("BT_").removesuffix("_DIR"): Path(value) for name, value in done["environment"].items()}


def state(shell: Shell) -> list[str]:
    return [one["state"] for one in shell.told("bdn", "volumes", "ls")["items"]]


def rubbish(shell: Shell) -> list[Path]:
    """What is left of volumes on the disk."""
    root = shell.data / "cache/jobs"
    return [path for path in (*root.iterdir(), *(root / ".trash").iterdir()) if path.name != ".trash"]


def fill(path: Path, size: int) -> int:
    """Write until so many bytes are there, or the disk says no; how many there are."""
    written = 0
    with path.open("wb", buffering=0) as file:
        while written < size:
            try:
                written += file.write(bytes(min(MIB, size - written)))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                break
        os.fsync(file.fileno())
    return written


def test_the_lines_that_create_prints_are_an_environment(cluster: Cluster) -> None:
    with node(cluster) as (shell, _):
        made = shell.run("bdn", "volumes", "create", "--job", "it's one", "--scratch", "64MiB")
        lines = made.out
        assert "docker run -v " in made.err
        script = f"eval {shlex.quote(lines)}; echo here > $BT_SCRATCH_DIR/file; cat $BT_SCRATCH_DIR/file"
        assert subprocess.run(["sh", "-c", script], check=True, capture_output=True).stdout == b"here\n"


def test_scratch_is_empty_private_and_the_same_when_it_is_asked_for_again(cluster: Cluster) -> None:
    with node(cluster) as (shell, _):
        scratch = created(shell)["SCRATCH"]
        assert list(scratch.iterdir()) == []
        assert (scratch.stat().st_mode & 0o777, scratch.stat().st_uid) == (0o700, os.geteuid())
        assert not any(folder.stat().st_mode & 0o044 for folder in (scratch.parent, scratch.parent.parent))
        (scratch / "file").write_bytes(b"x")
        assert created(shell)["SCRATCH"] == scratch
        other = created(shell, "job-1", "--rank", "1")["SCRATCH"]
        assert other != scratch
        assert list(other.iterdir()) == []
        done = shell.run("bdn", "volumes", "create", "--job", "job-1", "--scratch", "1GB")
        assert "other sizes" in done.err


@needs_images
def test_a_mounted_scratch_says_that_it_is_full_and_harms_nobody(cluster: Cluster) -> None:
    with node(cluster, BDN_AGENT_EXPOSURE="bind") as (shell, _):
        scratch, other = created(shell)["SCRATCH"], created(shell, "job-2")["SCRATCH"]
        written = fill(scratch / "file", 2 * SCRATCH)
        assert 0.8 * SCRATCH < written < SCRATCH  # the rest is the file system itself
        assert fill(other / "file", MIB) == MIB
        (volume, _) = shell.told("bdn", "volumes", "ls")["items"][::-1]
        assert (volume["scratch"]["bound"], volume["error"]) == ("image", None)
        shell.told("bdn", "volumes", "rm", "--job", "job-1", "--wait")
        assert not scratch.exists()
        shell.told("bdn", "volumes", "rm", "--job", "job-2", "--wait")
        wait_until(lambda: rubbish(shell) == [], 240)
        assert mounts_below(shell.data / "cache/jobs") == []


@needs_images
def test_checkpoints__scratch_is_full__have_room_of_their_own(cluster: Cluster) -> None:
    with node(cluster, BDN_AGENT_EXPOSURE="bind") as (shell, _):
        places = created(shell, "job-1", "--checkpoints", f"{SCRATCH}", "--project", "llama")
        assert fill(places["SCRATCH"] / "file", 2 * SCRATCH) < SCRATCH
        (places["CHECKPOINT"] / "step-1").mkdir()
        assert fill(places["CHECKPOINT"] / "step-1/model.bin", SCRATCH // 2) == SCRATCH // 2
        shell.told("bdn", "volumes", "rm", "--job", "job-1", "--wait")
        assert [one["checkpoint_id"] for one in _checkpoints(shell)] == ["step-1"]


def test_a_watched_scratch_that_holds_too_much_has_its_process_stopped(cluster: Cluster) -> None:
    with node(cluster) as (shell, _):
        environment = created(shell)
        (volume,) = shell.told("bdn", "volumes", "ls")["items"]
        with (
            subprocess.Popen(["sleep", "600"], start_new_session=True) as job,
            shell.running("bdn", "volumes", "guard", volume["id"], "--pid", str(job.pid)) as guard,
        ):
            assert fill(environment["SCRATCH"] / "file", 2 * SCRATCH) == 2 * SCRATCH
            assert job.wait(240) == -signal.SIGTERM
            assert guard.wait(240) == 1
        (volume,) = shell.told("bdn", "volumes", "ls")["items"]
        assert (volume["scratch"]["bound"], volume["error"]["code"]) == ("watch", "SCRATCH_FULL")


@pytest.mark.parametrize("exposure", ["symlink", pytest.param("bind", marks=needs_mounts)])
def test_volumes_outlive_an_agent_that_is_killed_and_end_with_their_machine(cluster: Cluster, exposure: str) -> None:
    project = ("--checkpoints", f"{SCRATCH}", "--project", "llama")
    with node(cluster, BDN_AGENT_EXPOSURE=exposure) as (shell, agent):
        places = created(shell, "job-1", *project)
        (places["SCRATCH"] / "file").write_bytes(b"x")
        agent.kill()
        agent.wait(240)
    (places["CHECKPOINT"] / "step-1").mkdir()
    (places["CHECKPOINT"] / "step-1/config.json").write_bytes(b"{}")
    with node(cluster, BDN_AGENT_EXPOSURE=exposure) as (shell, agent):
        assert created(shell, "job-1", *project) == places
        assert tree(places["SCRATCH"]) == {"file": b"x"}
        wait_until(lambda: [one["checkpoint_id"] for one in _checkpoints(shell)] == ["step-1"], 240)
        (places["CHECKPOINT"] / ".late").mkdir()
        (places["CHECKPOINT"] / ".late/model.safetensors").write_bytes(b"late weights")
        agent.kill()
        agent.wait(240)
    (places["CHECKPOINT"] / ".late").rename(places["CHECKPOINT"] / "step-2")
    record = next((shell.data / "cache/jobs").glob("jv_*/volume.json"))
    record.write_text(json.dumps(json.loads(record.read_text()) | {"boot": "another"}))
    with node(cluster, BDN_AGENT_EXPOSURE=exposure) as (shell, _):
        assert not places["SCRATCH"].exists()
        wait_until(lambda: shell.told("bdn", "volumes", "ls")["items"] == [], 240)
        assert [one["checkpoint_id"] for one in _checkpoints(shell)] == ["step-1"]  # nobody saw that step-2 had settled
        wait_until(lambda: rubbish(shell) == [], 240)


def _checkpoints(shell: Shell) -> list[Any]:
    found: list[Any] = shell.told("bdn", "checkpoints", "ls")["items"]
    return found


def test_what_is_not_pushed_when_the_job_ends_is_pushed_then_and_loaded_elsewhere(cluster: Cluster) -> None:
    with node(cluster) as (shell, _), ExitStack() as stack:
        places = [
            created(shell, "job-1", "--rank", rank, "--checkpoints", "64MiB", "--project", "llama")["CHECKPOINT"]
            for rank in ("0", "1")
        ]
        for rank, place in enumerate(places):
            (place / "step-9").mkdir()
            (place / "step-9/model.safetensors").write_bytes(b"%d" % rank * MIB)
        (places[0] / "step-10").mkdir()
        (places[0] / "step-10/model.safetensors").write_bytes(b"of rank 0 alone")
        shell.told("bdn", "volumes", "rm", "--job", "job-1", "--wait")
        assert not any(place.exists() for place in places)
        again = shell.told("bdn", "stage", "bt://llama@job-1/step-10", "--job", "job-2")
        assert again["mounts"][0]["bytes_from"] == {"node": 15, "cluster": 0, "mirror": 0}  # the newest is kept here
        other, _ = stack.enter_context(node(cluster, "node-2"))
        every = created(other, "job-2", "--rank", "1", "--load", "bt://llama@job-1/step-9")["LOAD_CHECKPOINT"]
        for rank in (0, 1):
            assert tree(every / f"rank-{rank}/step-9") == {"model.safetensors": b"%d" % rank * MIB}
        own = created(other, "job-3", "--rank", "0", "--nodes", "2", "--load", "bt://llama")
        assert [path.name for path in own["LOAD_CHECKPOINT"].iterdir()] == ["rank-0"]
        assert [path.name for path in (own["LOAD_CHECKPOINT"] / "rank-0").iterdir()] == ["step-9"]
        newest = created(other, "job-6", "--load", "bt://llama@job-1")["LOAD_CHECKPOINT"]
        assert tree(newest / "rank-0/step-10") == {"model.safetensors": b"of rank 0 alone"}
        assert "LOAD_CHECKPOINT" not in created(other, "job-4", "--load", "bt://nothing-yet")
        done = other.run("bdn", "volumes", "create", "--job", "job-5", "--load", "bt://llama@job-1/step-11")
        assert "SOURCE_NOT_FOUND" in done.err


def test_checkpoints_wait_for_a_mirror_that_is_away_and_not_for_ever(backend: str, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {})
    words = ("--checkpoints", "64MiB", "--project", "llama")
    with ExitStack() as stack:
        stack.enter_context(unmounting(tmp_path))
        with cluster.mirror(), node(cluster) as (shell, _):
            places = [created(shell, job, *words)["CHECKPOINT"] for job in ("job-1", "job-2")]
            created(shell, "job-3")
            (places[0] / "step-1").mkdir()
            (places[0] / "step-1/.bdn-open").touch()
            (places[0] / "step-1/model.safetensors").write_bytes(b"x" * MIB)
            wait_until(lambda: shell.run("bdn-admin", "agents", "--json").document["items"][0]["unsynced_bytes"] == MIB)
        with node(cluster) as (shell, _):
            (places[0] / "step-1/.bdn-open").unlink()
            shell.told("bdn", "volumes", "rm", "--job", "job-1")
            wait_until(lambda: _of(shell, "job-1")["checkpoints"]["error"] is not None, 300)
            waiting = _of(shell, "job-1")
            assert (waiting["state"], waiting["scratch"]) == ("DRAINING", None)
            assert waiting["checkpoints"]["unsynced_bytes"] == MIB
            assert _of(shell, "job-3")["state"] == "OPEN"
        with cluster.mirror(), node(cluster) as (shell, _):
            wait_until(
                lambda: [one["run_id"] for one in shell.told("bdn", "volumes", "ls")["items"]] == ["job-3", "job-2"]
            )
            assert [one["source"] for one in _checkpoints(shell)] == ["bt://llama@job-1/step-1"]
        with node(cluster, BDN_AGENT_UNSYNCED_SECONDS="0") as (shell, _):
            (places[1] / "step-1").mkdir()
            (places[1] / "step-1/model.safetensors").write_bytes(b"x" * MIB)
            shell.told("bdn", "volumes", "rm", "--job", "job-2", "--wait")
            assert not places[1].exists()


def _of(shell: Shell, job: str) -> Any:
    (found,) = [one for one in shell.told("bdn", "volumes", "ls")["items"] if one["run_id"] == job]
    return found


def test_jobs_of_a_project_share_its_cache_until_they_have_ended(cluster: Cluster) -> None:
    with node(cluster) as (shell, agent):
        first = created(shell, "job-1", "--cache", "llama", "--huggingface")
        assert first["RW_CACHE"] == first["PROJECT_CACHE"]
        assert created(shell, "job-1", "--cache", "llama") == first
        for words in ((), ("--cache", "other")):
            done = shell.run("bdn", "volumes", "create", "--job", "job-1", "--scratch", f"{SCRATCH}", *words)
            assert "another training cache" in done.err
        (first["PROJECT_CACHE"] / "tokens").write_bytes(b"made by the first")
        assert tree(created(shell, "job-2", "--cache", "llama")["PROJECT_CACHE"]) == {"tokens": b"made by the first"}
        other = created(shell, "job-3", "--cache", "mistral")
        assert other["TEAM_CACHE"] == first["TEAM_CACHE"]
        assert tree(other["PROJECT_CACHE"]) == {}
        agent.kill()
        agent.wait(240)
    with node(cluster) as (shell, _):
        remove = ("cache", "rm", "llama", "user_artifacts/tokens", "--json")
        refused = shell.run("bdn-admin", *remove)
        assert refused.code == 3
        assert "IN_USE" in refused.out
        for job in ("job-1", "job-2"):
            shell.told("bdn", "volumes", "rm", "--job", job, "--wait")
        assert (first["PROJECT_CACHE"] / "tokens").exists()
        assert shell.run("bdn-admin", *remove).code == 0
        assert tree(first["PROJECT_CACHE"]) == {}


def test_a_model_of_the_hub__downloaded_by_one_job__is_in_the_cache_of_the_next(cluster: Cluster, hub: Hub) -> None:
    """By the real client, which looks there before it asks the hub."""
    model = {"config.json": b"{}", "deep/model.safetensors": bytes(MIB)}
    hub.repo("org/model").commit(model)
    program = "from huggingface_hub import snapshot_download; print(snapshot_download('org/model'))"
    with node(cluster) as (shell, _):
        for job in ("job-1", "job-2"):
            home = created(shell, job, "--cache", "llama")["PROJECT_CACHE"] / "huggingface"
            environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
            done = subprocess.run(
                [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
            )
            assert tree(Path(done.stdout.strip())) == model
            shell.told("bdn", "volumes", "rm", "--job", job, "--wait")
        assert hub.log.count(method="GET", origin="cdn") == 1
