"""``bdn stage --view hub``: unmodified clients of the hub find a staged repository by its name, offline and read-only."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import IncompleteSnapshotError

from tests.doubles.faults import drop
from tests.doubles.hub import Hub
from tests.support.agent.mounts import mounted, needs_mounts, unmounting
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Finished, Shell

FILES = {
    "config.json": b'{"model_type": "bert"}',
    "model.safetensors": noise(9 * MIB + 1, 1),
    "nested/deeper/tok+en izer%.json": b"{}",
    "nested/empty.txt": b"",
    ".gitattributes": b"*.safetensors filter=lfs\n",
}


@pytest.fixture(scope="module")
def upstream() -> Iterator[Hub]:
    with Hub() as double:
        yield double


@pytest.fixture(scope="module")
def cluster(backend: str, tmp_path_factory: pytest.TempPathFactory, upstream: Hub) -> Iterator[Cluster]:
    started = Cluster(tmp_path_factory.mktemp("services"), {"HF_ENDPOINT": upstream.url})
    with started.mirror():
        yield started


@pytest.fixture
def node(cluster: Cluster) -> Iterator[Shell]:
    with cluster.agent() as shell:
        yield shell
        shell.told("bdn", "unstage", "--all")


def staged(shell: Shell, *sources: str, job: str = "serve", options: tuple[str, ...] = ()) -> Any:
    mounts = [part for number in range(len(sources)) for part in ("--mount", f"/m{number}")]
    mirror = shell.told("bdn", "mirror", *sources, *mounts, *options, "--wait")
    return shell.told("bdn", "stage", mirror["id"], "--job", job, "--view", "hub")


def offline(root: Path, repo_id: str, revision: str | None = None, **options: Any) -> dict[str, bytes]:
    found = snapshot_download(repo_id, revision=revision, cache_dir=root, local_files_only=True, **options)
    return tree(Path(found))


def hf(shell: Shell, root: Path, *command: str) -> Finished:
    return shell.executed().run("hf", *command, HF_HUB_CACHE=str(root), HF_HUB_DISABLE_UPDATE_CHECK="1")


@needs_mounts
def test_a_staged_repository_is_found_by_name_offline_across_kill_9_and_cannot_be_harmed(
    cluster: Cluster, upstream: Hub, tmp_path: Path
) -> None:
    sha = upstream.repo("org/model").commit(FILES)
    shell, root = cluster.shell("bound", BDN_AGENT_EXPOSURE="bind"), tmp_path / "hub"
    shell.root.mkdir()
    with unmounting(shell.root), ExitStack() as stack:
        with shell.running("bdn-node-agent") as agent:
            cluster.await_agent(shell)
            stage = staged(shell, "hf://org/model")
            (mount,) = stage["mounts"]
            assert (stage["view"], mount["commit"], mount["exposure"]) == ("hub", sha, "bind")
            assert Path(mount["path"]).name == "models--org--model"
            stack.enter_context(mounted(root / "models--org--model", "--bind", mount["path"]))
            agent.kill()
            agent.wait()
        upstream.log.clear()

        for revision in (None, "main", sha):
            assert offline(root, "org/model", revision) == FILES
            for path, content in FILES.items():
                found = hf_hub_download("org/model", path, revision=revision, cache_dir=root, local_files_only=True)
                assert Path(found).read_bytes() == content
        assert hf(shell, root, "cache", "ls", "--quiet").out.split() == ["model/org/model"]

        with shell.running("bdn-node-agent"):
            cluster.await_agent(shell)
            (known,) = shell.told("bdn", "stage", mirror_of(shell), "--job", "serve", "--view", "hub")["mounts"]
            assert known["path"] == mount["path"]
            refused = hf(shell, root, "cache", "rm", "model/org/model", "--yes")
            assert "Read-only file system" in refused.out + refused.err, refused
            verified = hf(
                shell, root, "cache", "verify", "org/model", "--fail-on-missing-files", "--fail-on-extra-files"
            )
            assert f"Verified {len(FILES)} file(s)" in verified.out, verified
            assert offline(root, "org/model") == FILES
            assert upstream.log.bytes_served("/resolve/") + upstream.log.bytes_served(origin="cdn") == 0
            stack.close()
            shell.told("bdn", "unstage", "--all")
            assert not Path(mount["path"]).exists()
            again = staged(shell, "hf://org/model", job="another")
            assert again["mounts"][0]["bytes_from"]["mirror"] == 0  # the cache kept all, unharmed


def mirror_of(shell: Shell) -> str:
    return str(shell.told("bdn", "mirror", "hf://org/model", "--mount", "/m0", "--wait")["id"])


def linked(root: Path, stage: Any) -> Path:
    """A cache of the client that has the staged folders."""
    root.mkdir(exist_ok=True)
    for path in {mount["path"] for mount in stage["mounts"]}:
        (root / Path(path).name).symlink_to(path)
    return root


def test_commits_and_repositories_of_one_stage_stand_in_one_cache(node: Shell, upstream: Hub, tmp_path: Path) -> None:
    repository = upstream.repo("org/several")
    old = repository.commit(FILES)
    repository.tag("v1")
    new = repository.commit({"README.md": b"# new\n"})
    upstream.repo("org/data", kind="dataset").commit({"a/train.parquet": b"rows"})

    stage = staged(node, "hf://org/several", "hf://org/several@v1", "hf://datasets/org/data")

    root = linked(tmp_path / "hub", stage)
    assert {path.name for path in root.iterdir()} == {"models--org--several", "datasets--org--data"}
    assert offline(root, "org/several") == offline(root, "org/several", new) == {**FILES, "README.md": b"# new\n"}
    assert offline(root, "org/several", "v1") == offline(root, "org/several", old) == FILES
    assert offline(root, "org/data", repo_type="dataset") == {"a/train.parquet": b"rows"}
    assert len(list((root / "models--org--several/blobs").iterdir())) == len(FILES) + 1


@pytest.mark.parametrize("allow", ["**/*.json", "config.json"], ids=["wide", "narrow"])
def test_a_staged_selection_is_never_taken_for_the_whole(
    node: Shell, upstream: Hub, tmp_path: Path, allow: str
) -> None:
    name = f"org/selected-{len(allow)}"
    upstream.repo(name).commit(FILES)

    stage = staged(node, f"hf://{name}", options=("--allow", allow))

    root = linked(tmp_path / "hub", stage)
    with pytest.raises(IncompleteSnapshotError, match=r"model\.safetensors"):
        offline(root, name)
    assert offline(root, name, allow_patterns=["config.json"])["config.json"] == FILES["config.json"]


def test_a_source_that_is_no_repository_of_a_hub_is_refused_by_name(
    cluster: Cluster, node: Shell, upstream: Hub, tmp_path: Path
) -> None:
    upstream.repo("org/plain").commit(FILES)
    checkpoint = tmp_path / "out/checkpoint-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_bytes(b"weights")
    assert node.run("bdn", "sync", str(tmp_path / "out"), "bt://llama@job-1", "--once").code == 0

    refused = node.run("bdn", "stage", "bt://llama@job-1/checkpoint-1", "--job", "serve", "--view", "hub")

    assert (refused.code, "is not a repository of a hub" in refused.err) == (2, True), refused.err


def test_a_staged_repository_needs_no_hub(node: Shell, upstream: Hub, tmp_path: Path) -> None:
    upstream.repo("org/away").commit(FILES)
    mirror = node.told("bdn", "mirror", "hf://org/away", "--mount", "/m", "--wait")
    upstream.fail(drop(), "org/away", times=None)

    stage = node.told("bdn", "stage", mirror["id"], "--job", "serve", "--view", "hub")

    assert offline(linked(tmp_path / "hub", stage), "org/away") == FILES
