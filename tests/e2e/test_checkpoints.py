"""What a job writes, by the commands: synced, listed, staged on a node, fetched and deleted."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Shell, wait_until

JOB = "bt://llama@train-42"
WEIGHTS = noise(17 * MIB + 3, 1)


@pytest.fixture(scope="module")
def services(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Shell]]:
    cluster = Cluster(tmp_path_factory.mktemp("checkpoints"), {})
    with cluster.mirror(), cluster.agent() as shell:
        yield cluster, shell


@pytest.fixture
def node(services: tuple[Cluster, Shell]) -> Iterator[Shell]:
    """A node of a mirror that has no checkpoint."""
    cluster, shell = services
    yield shell
    with cluster.http() as mirror:
        for one in mirror.get("/checkpoints").json()["items"]:
            mirror.delete(f"/checkpoints/{one['id']}").raise_for_status()


def write(folder: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    for path, content in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return files


def sources(shell: Shell) -> list[str]:
    return [one["source"] for one in shell.told("bdn", "checkpoints", "ls")["items"]]


@pytest.mark.production
def test_what_a_job_wrote_is_staged_on_a_node_like_any_model(node: Shell, tmp_path: Path) -> None:
    written = write(tmp_path / "out/checkpoint-100", {"model.safetensors": WEIGHTS, "config.json": b"{}", "sub/x": b""})
    write(tmp_path / "out", {"tmp-checkpoint-200/model.safetensors": b"half"})
    (pushed,) = node.told("bdn", "sync", str(tmp_path / "out"), JOB, "--once")["pushed"]
    assert pushed["source"] == f"{JOB}/checkpoint-100"
    assert pushed["bytes_transferred"] == len(WEIGHTS) + 2

    stage = node.told("bdn", "stage", "bt://llama", "--job", "train-43")
    assert tree(Path(stage["mounts"][0]["path"])) == written
    node.told("bdn", "checkpoints", "pull", JOB, str(tmp_path / "pulled"))
    assert tree(tmp_path / "pulled") == written
    node.told("bdn", "unstage", stage["id"])


def test_checkpoints_pull__destination_is_a_file__is_refused_before_the_mirror_is_asked(
    node: Shell, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()

    refused = node.told("bdn", "checkpoints", "pull", f"{JOB}/absent", str(tmp_path / "file"), code=2)

    assert "it is a file" in refused["error"]["message"]


def test_a_job_syncs_with_a_grant_to_push_alone(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"BDN_AUTH": "token", "BDN_TOKEN": "operator"})
    with cluster.mirror():
        operator = cluster.shell("operator")
        job = cluster.shell("job", BDN_TOKEN=operator.told("bdn", "checkpoints", "grant", JOB)["grant"])
        job.root.mkdir()
        write(tmp_path / "out/checkpoint-1", {"x": b"1"})
        assert len(job.told("bdn", "sync", str(tmp_path / "out"), JOB, "--once")["pushed"]) == 1
        refused = job.run("bdn", "sync", str(tmp_path / "out"), "bt://llama@train-43", "--once", "--json")
        assert refused.document["error"]["code"] == "UNAUTHENTICATED"
        assert job.run("bdn", "checkpoints", "ls", "--json").document["error"]["code"] == "UNAUTHENTICATED"
        assert sources(operator) == [f"{JOB}/checkpoint-1"]


def test_a_token_of_a_team_syncs_lists_and_deletes_what_is_the_team_s(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"BDN_AUTH": "token", "BDN_TOKEN": "operator"})
    with cluster.mirror():
        operator = cluster.shell("operator")
        teams = {}
        for name in ("research", "vision"):
            made = operator.run("bdn-admin", "teams", "create", name, "--json")
            assert made.document["name"] == name, made.err
            options = ["--organisation", "default", "--role", "controller", "--team", name]
            token = operator.run("bdn-admin", "tokens", "create", name, *options, "--json").document
            teams[name] = cluster.shell(name, BDN_TOKEN=token["token"])
            teams[name].root.mkdir()
            write(tmp_path / f"out/{name}/checkpoint-1", {"x": name.encode()})
            assert len(teams[name].told("bdn", "sync", str(tmp_path / f"out/{name}"), JOB, "--once")["pushed"]) == 1
        research, vision = teams.values()
        assert sources(research) == sources(vision) == [f"{JOB}/checkpoint-1"]
        assert len(set(sources(operator))) == 2  # by their projects' ids
        (project,) = research.run("bdn-admin", "projects", "ls", "--json").document["items"]
        assert (project["name"], project["team"], project["checkpoints"]) == ("llama", "research", 1)
        assert vision.run("bdn-admin", "projects", "rm", project["id"]).code == 4
        listed = operator.run("bdn-admin", "projects", "ls")
        assert any(line.split()[:4] == [project["id"], "llama", "research", "1"] for line in listed.out.splitlines())
        removed = research.run("bdn-admin", "projects", "rm", "llama", "--quiet")
        assert (removed.code, removed.out) == (0, f"{project['id']}\n")
        assert (sources(research), sources(vision)) == ([], [f"{JOB}/checkpoint-1"])
        refused = research.run("bdn-admin", "secrets", "ls", "--json").document
        assert refused["error"]["code"] == "UNAUTHENTICATED"
        listed = operator.run("bdn-admin", "teams", "ls")
        assert [line.split()[1] for line in listed.out.splitlines()[1:]] == ["research", "vision", "Default"]


def test_what_is_not_complete_is_not_pushed(node: Shell, tmp_path: Path) -> None:
    index = json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    )
    shards = {"model.safetensors.index.json": index.encode(), "model-00001-of-00002.safetensors": b"1st shard"}
    write(tmp_path / "lacks-a-shard", shards)
    write(tmp_path / "says-so", {"x": b"1", ".bdn-open": b""})
    write(tmp_path / "is-open", {"x": b"1"})
    write(tmp_path / "whole", {"x": b"1"})
    with (tmp_path / "is-open/x").open("ab"):
        done = node.told("bdn", "sync", str(tmp_path), JOB, "--once", code=1)
    assert sorted(done["left"]) == ["is-open", "lacks-a-shard", "says-so"]
    assert sources(node) == [f"{JOB}/whole"]
    write(tmp_path / "lacks-a-shard", {"model-00002-of-00002.safetensors": b"2nd shard"})
    (tmp_path / "says-so/.bdn-open").unlink()
    assert len(node.told("bdn", "sync", str(tmp_path), JOB, "--once")["pushed"]) == 3


def test_a_sync_that_runs_on_pushes_what_settles(node: Shell, tmp_path: Path) -> None:
    write(tmp_path, {"loose.txt": b"1"})
    with node.running("bdn", "sync", str(tmp_path), JOB, "--settle", "0s"):
        wait_until(lambda: sources(node) == [f"{JOB}/."], seconds=120)
        write(tmp_path / "checkpoint-1", {"x": b"1"})
        wait_until(lambda: f"{JOB}/checkpoint-1" in sources(node), seconds=120)


def test_the_job_comes_first_where_processors_are_short(node: Shell, tmp_path: Path) -> None:
    write(tmp_path, {"loose.txt": b"1"})
    with node.running("bdn", "sync", str(tmp_path), JOB, "--settle", "0s") as process:
        wait_until(lambda: sources(node) == [f"{JOB}/."], seconds=120)
        of_threads = set()
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with suppress(ProcessLookupError):  # it ends meanwhile
                of_threads.add(os.getpriority(os.PRIO_PROCESS, int(task.name)))
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert of_threads == {min(mine + 10, 19)}


def test_checkpoints_are_deleted_by_name_or_but_for_the_newest(node: Shell, tmp_path: Path) -> None:
    for step in (9, 10, 100):
        write(tmp_path / f"checkpoint-{step}", {"step.pt": str(step).encode()})
        os.utime(tmp_path / f"checkpoint-{step}/step.pt", (1_800_000_000, 1_800_000_000))
    node.told("bdn", "sync", str(tmp_path), JOB, "--once")
    node.told("bdn", "sync", str(tmp_path), f"{JOB}#rank-1", "--once")
    assert len(sources(node)) == 6
    assert len(node.told("bdn", "checkpoints", "rm", f"{JOB}/checkpoint-9")["items"]) == 2
    node.told("bdn", "checkpoints", "rm", JOB, "--keep-last", "1")
    assert sources(node) == [f"{JOB}/checkpoint-100", f"{JOB}/checkpoint-100#rank-1"]
    refused = node.told("bdn", "checkpoints", "rm", f"{JOB}/checkpoint-9", code=4)
    assert refused["error"]["code"] == "NOT_FOUND"


@pytest.mark.parametrize("job", ["bt://llama", "bt://llama@train-42/x", "hf://org/model"])
def test_sync_takes_the_name_of_a_job(node: Shell, tmp_path: Path, job: str) -> None:
    assert node.told("bdn", "sync", str(tmp_path), job, "--once", code=2)["error"]["code"] == "INVALID_REQUEST"
    absent = node.told("bdn", "sync", str(tmp_path / "absent"), JOB, "--once", code=2)
    assert "is not a directory" in absent["error"]["message"]
