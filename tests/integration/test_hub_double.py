"""The real ``huggingface_hub`` client finds in the double what it finds in the real hub, by every door that it has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import (
    HfApi,
    HfFileSystem,
    close_session,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    GatedRepoError,
)
from huggingface_hub.hf_api import RepoFile

from tests.doubles.content import Content, GeneratedContent
from tests.doubles.hub import Hub
from tests.doubles.hub_repository import HubRepository
from tests.doubles.real_client import confine

LARGE = GeneratedContent(3_000_000, seed=1)
FILES: dict[str, Content] = {
    "config.json": b'{"a": 1}',
    "sub dir/tok+en%.txt": b"hello",
    "empty.txt": b"",
    "model-00001.safetensors": LARGE,
    "big/model-00002.safetensors": b"small, yet LFS",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    confine(tmp_path, monkeypatch)
    with Hub(page_size=2) as hub:
        yield hub
    close_session()


@pytest.fixture
def repo(hub: Hub) -> HubRepository:
    repo = hub.repo("org/model")
    repo.commit(FILES)
    return repo


def tree_below(folder: str | Path) -> dict[str, bytes]:
    root = Path(folder)
    files = [path for path in root.rglob("*") if path.is_file() and ".cache" not in path.relative_to(root).parts]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def content_of(file: Content) -> bytes:
    return file if isinstance(file, bytes) else file.read(0, file.size)


@pytest.mark.parametrize("kind", ["model", "dataset", "space"])
def test_a_snapshot_is_byte_for_byte_the_repository(hub: Hub, tmp_path: Path, kind: str) -> None:
    hub.repo("org/thing", kind=kind).commit(FILES)  # type: ignore[arg-type]
    folder = snapshot_download("org/thing", repo_type=kind, local_dir=tmp_path / "d", endpoint=hub.url, token=False)
    assert tree_below(folder) == {path: content_of(content) for path, content in FILES.items()}


@pytest.mark.usefixtures("repo")
def test_a_snapshot_takes_only_what_its_patterns_allow(hub: Hub, tmp_path: Path) -> None:
    folder = snapshot_download(
        "org/model",
        local_dir=tmp_path / "d",
        endpoint=hub.url,
        token=False,
        allow_patterns=["*.safetensors", "*.json"],
        ignore_patterns=["big/*"],
    )
    assert set(tree_below(folder)) == {"config.json", "model-00001.safetensors"}


def test_every_revision_leads_to_its_own_bytes(hub: Hub, repo: HubRepository, tmp_path: Path) -> None:
    first = repo.refs["refs/heads/main"]
    repo.tag("v1.0")
    repo.commit({"config.json": b"request"}, branch="refs/pr/1")
    repo.commit({"config.json": b"new", "empty.txt": None})
    found = {}
    for revision in ("main", "v1.0", "refs/pr/1", first):
        path = hf_hub_download(
            "org/model", "config.json", revision=revision, cache_dir=tmp_path / "c", endpoint=hub.url, token=False
        )
        found[revision] = Path(path).read_bytes()
    assert found == {"main": b"new", "v1.0": b'{"a": 1}', "refs/pr/1": b"request", first: b'{"a": 1}'}


def test_the_ordinary_cache_holds_one_snapshot_per_commit(hub: Hub, repo: HubRepository) -> None:
    folder = snapshot_download("org/model", endpoint=hub.url, token=False)
    assert Path(folder).name == repo.refs["refs/heads/main"]
    assert (Path(folder) / "model-00001.safetensors").readlink().name == LARGE.sha256


def test_refs_name_branches_tags_and_pull_requests(hub: Hub, repo: HubRepository) -> None:
    repo.tag("v1.0")
    repo.commit({"x": b"1"}, branch="dev")
    repo.commit({"x": b"2"}, branch="refs/pr/1")
    refs = HfApi(endpoint=hub.url, token=False).list_repo_refs("org/model", include_pull_requests=True)
    assert {branch.name: branch.target_commit for branch in refs.branches} == {
        "main": repo.refs["refs/heads/main"],
        "dev": repo.refs["refs/heads/dev"],
    }
    assert [tag.ref for tag in refs.tags] == ["refs/tags/v1.0"]
    assert [request.ref for request in refs.pull_requests or []] == ["refs/pr/1"]


def test_a_description_tells_what_the_client_wants_to_know(hub: Hub, repo: HubRepository) -> None:
    info = HfApi(endpoint=hub.url, token=False).model_info("org/model", files_metadata=True)
    assert (info.sha, info.private, info.gated) == (repo.refs["refs/heads/main"], False, False)
    assert {file.rfilename: file.size for file in info.siblings or []} == {
        path: len(content_of(content)) for path, content in FILES.items()
    }


@pytest.mark.usefixtures("repo")
def test_a_tree_comes_in_pages_with_folders_and_lfs_facts(hub: Hub) -> None:
    entries = {
        entry.path: entry for entry in HfApi(endpoint=hub.url, token=False).list_repo_tree("org/model", recursive=True)
    }
    assert set(entries) == {*FILES, "sub dir", "big"}
    large, small = entries["model-00001.safetensors"], entries["config.json"]
    assert isinstance(large, RepoFile)
    assert large.lfs is not None
    assert large.lfs.sha256 == LARGE.sha256
    assert isinstance(small, RepoFile)
    assert small.lfs is None
    assert hub.log.count("/tree/main") == 4


@pytest.mark.usefixtures("repo")
def test_paths_can_be_asked_for_by_name(hub: Hub) -> None:
    found = HfApi(endpoint=hub.url, token=False).get_paths_info("org/model", ["config.json", "big", "none"])
    assert {entry.path for entry in found} == {"config.json", "big"}


@pytest.mark.usefixtures("repo")
def test_the_file_system_interface_reads_ranges_and_lists_folders(hub: Hub) -> None:
    files = HfFileSystem(endpoint=hub.url, token=False, skip_instance_cache=True)
    assert files.cat_file("org/model/model-00001.safetensors", start=10, end=20) == LARGE.read(10, 20)
    assert files.ls("org/model/big", detail=False) == ["org/model/big/model-00002.safetensors"]


def test_metadata_has_the_shapes_of_the_real_hub(hub: Hub, repo: HubRepository) -> None:
    url = hf_hub_url("org/model", "model-00001.safetensors", endpoint=hub.url)
    large = get_hf_file_metadata(url, token=False)
    small = get_hf_file_metadata(hf_hub_url("org/model", "config.json", endpoint=hub.url), token=False)
    assert (large.commit_hash, large.etag, large.size) == (repo.refs["refs/heads/main"], LARGE.sha256, LARGE.size)
    assert large.location.startswith(hub.cdn_url)
    assert small.location.startswith(f"{hub.url}/api/resolve-cache/models/org/model/")
    assert small.etag == repo.commits[small.commit_hash or ""].files["config.json"].oid


@pytest.mark.usefixtures("repo")
def test_a_token_says_who_somebody_is(hub: Hub) -> None:
    assert HfApi(endpoint=hub.url, token=hub.token).whoami()["name"] == hub.token


def test_private_files_are_downloaded_with_a_token_that_the_cdn_never_sees(hub: Hub, tmp_path: Path) -> None:
    hub.repo("org/private", private=True).commit(FILES)
    folder = snapshot_download("org/private", local_dir=tmp_path / "d", endpoint=hub.url, token=hub.token)
    assert len(tree_below(folder)) == len(FILES)
    assert hub.log.find(origin="cdn")
    assert not [request for request in hub.log.find(origin="cdn") if "authorization" in request.headers]


def test_gated_repositories_are_described_and_listed_to_everybody_but_not_served(hub: Hub, tmp_path: Path) -> None:
    repository = hub.repo("org/gated", gated=True)
    repository.commit(FILES)
    api = HfApi(endpoint=hub.url, token=False)
    assert api.repo_info("org/gated").gated == "manual"
    assert set(api.list_repo_files("org/gated")) == set(FILES)
    with pytest.raises(GatedRepoError):
        hf_hub_download("org/gated", "config.json", local_dir=tmp_path, endpoint=hub.url, token=hub.stranger_token)
    repository.allow(hub.stranger_token)
    hf_hub_download("org/gated", "config.json", local_dir=tmp_path, endpoint=hub.url, token=hub.stranger_token)
