"""The real ``huggingface_hub`` client finds in the double what it finds in the real hub, by every door that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from huggingface_hub import (
    HfApi,
    HfFileSystem,
    close_session,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from tests.doubles.content import PERIOD, Content, GeneratedContent
from tests.doubles.faults import answer, drop, flip_byte, ignore_range, rate_limited, stall, truncate
from tests.doubles.hub import Hub
from tests.doubles.hub_repository import HubRepository

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
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    # The client asks its idea of the hub, once, which harness it runs in, unless it knows already.
    registry = tmp_path / "harnesses.json"
    registry.write_text('{"standardEnvVars": [], "harnesses": {}}')
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(registry))
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


REFUSALS: list[tuple[str, Callable[[HfApi], object], str | None, type[HfHubHTTPError], int]] = [
    ("no repository", lambda api: api.repo_info("org/none"), None, RepositoryNotFoundError, 401),
    ("no repository, signed in", lambda api: api.repo_info("org/none"), "owner", RepositoryNotFoundError, 404),
    ("private", lambda api: api.repo_info("org/private"), None, RepositoryNotFoundError, 401),
    ("private, stranger", lambda api: api.auth_check("org/private"), "stranger", RepositoryNotFoundError, 404),
    ("no revision", lambda api: api.repo_info("org/model", revision="no"), None, RevisionNotFoundError, 404),
    ("shortened SHA", lambda api: api.repo_info("org/model", revision="abcdef1"), None, RevisionNotFoundError, 404),
    ("gated", lambda api: api.auth_check("org/gated"), None, GatedRepoError, 401),
    ("gated, stranger", lambda api: api.auth_check("org/gated"), "stranger", GatedRepoError, 403),
    ("disabled", lambda api: api.repo_info("org/disabled"), None, DisabledRepoError, 403),
    ("wrong token", lambda api: api.repo_info("org/model"), "wrong", HfHubHTTPError, 401),
    (
        "no file",
        lambda api: api.get_hf_file_metadata(url=hf_hub_url("org/model", "none", endpoint=api.endpoint)),
        None,
        RemoteEntryNotFoundError,
        404,
    ),
    (
        "gated file",
        lambda api: api.get_hf_file_metadata(url=hf_hub_url("org/gated", "config.json", endpoint=api.endpoint)),
        "stranger",
        GatedRepoError,
        403,
    ),
]


@pytest.mark.usefixtures("repo")
@pytest.mark.parametrize(
    ("ask", "token", "expected", "status"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS]
)
def test_a_refusal_reaches_the_client_as_its_own_error(
    hub: Hub, ask: Callable[[HfApi], object], token: str | None, expected: type[HfHubHTTPError], status: int
) -> None:
    for name in ("private", "gated", "disabled"):
        repository = hub.repo(f"org/{name}", private=name == "private", gated=name == "gated")
        repository.commit(FILES)
        repository.disabled = name == "disabled"
    tokens: dict[str | None, str | bool] = {
        None: False,
        "owner": hub.token,
        "stranger": hub.stranger_token,
        "wrong": "hf_wrong",
    }
    with pytest.raises(expected) as raised:
        ask(HfApi(endpoint=hub.url, token=tokens[token]))
    assert raised.value.response.status_code == status
    assert type(raised.value) is expected


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


@pytest.mark.usefixtures("repo")
def test_the_client_waits_as_long_as_a_429_asks(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    hub.fail(rate_limited(7), "/tree/")
    hub.fail(answer(429, {"ratelimit": '"api";r=0;t=55'}), "/tree/")
    assert list(HfApi(endpoint=hub.url, token=False).list_repo_tree("org/model"))
    assert waits == [8, 56]


@pytest.mark.usefixtures("repo")
def test_the_client_survives_a_dropped_and_a_truncated_answer(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("utils._http", "file_download"):
        monkeypatch.setattr(f"huggingface_hub.{module}.time.sleep", lambda _: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
    hub.fail(drop(), "/tree/")
    hub.fail(truncate(100_000), origin="cdn")
    assert set(HfApi(endpoint=hub.url, token=False).list_repo_files("org/model")) == set(FILES)
    path = hf_hub_download(
        "org/model", "model-00001.safetensors", local_dir=tmp_path / "d", endpoint=hub.url, token=False
    )
    assert Path(path).read_bytes() == LARGE.read(0, LARGE.size)
    assert [request.headers.get("range") for request in hub.log.find(origin="cdn")] == [None, "bytes=100000-"]


@pytest.mark.usefixtures("repo")
def test_a_signed_link_that_was_changed_or_has_expired_is_refused(hub: Hub) -> None:
    url = hf_hub_url("org/model", "model-00001.safetensors", endpoint=hub.url)
    location = get_hf_file_metadata(url, token=False).location
    with httpx2.Client() as client:
        assert client.get(location, headers={"Range": "bytes=5-9"}).content == LARGE.read(5, 10)
        assert client.get(location.replace("Signature=", "Signature=0")).status_code == 403
        assert client.get(location, headers={"Authorization": f"Bearer {hub.token}"}).status_code == 400
        hub.expire_links()
        assert client.get(location).status_code == 403


@pytest.mark.usefixtures("repo")
def test_bytes_fail_on_command_in_ways_that_a_status_does_not_show(hub: Hub) -> None:
    url = hf_hub_url("org/model", "model-00001.safetensors", endpoint=hub.url)
    location = get_hf_file_metadata(url, token=False).location
    wanted = {"Range": "bytes=100-199"}
    with httpx2.Client(timeout=0.1) as client:
        hub.fail(ignore_range(), origin="cdn")
        whole = client.get(location, headers=wanted)
        assert (whole.status_code, len(whole.content)) == (200, LARGE.size)
        hub.fail(flip_byte(at=3), origin="cdn")
        flipped, right = client.get(location, headers=wanted).content, LARGE.read(100, 200)
        assert [at for at in range(100) if flipped[at] != right[at]] == [3]
        hub.fail(truncate(10), origin="cdn")
        with pytest.raises(httpx2.RemoteProtocolError):
            client.get(location, headers=wanted)
        hub.fail(stall(at=10), origin="cdn")
        with pytest.raises(httpx2.ReadTimeout):
            client.get(location, headers=wanted)
    assert [request.bytes_served for request in hub.log.find(origin="cdn")][-1] == 10


def test_large_files_are_served_by_range_in_constant_memory_and_without_equal_chunks(hub: Hub) -> None:
    content = GeneratedContent(5 * 1024**4).declaring("1" * 64)
    hub.repo("org/huge").commit({"huge.bin": content})
    location = get_hf_file_metadata(hf_hub_url("org/huge", "huge.bin", endpoint=hub.url), token=False).location
    parts = urlsplit(location)
    connection = HTTPConnection(str(parts.hostname), parts.port)
    pieces = []
    for start in (0, 8 * 1024**2, PERIOD - 5, content.size - 16):
        connection.request("GET", f"{parts.path}?{parts.query}", headers={"Range": f"bytes={start}-{start + 15}"})
        pieces.append(connection.getresponse().read())
        assert pieces[-1] == content.read(start, start + 16)
    connection.close()
    assert len(set(pieces)) == 4
    assert hub.log.bytes_served(origin="cdn") == 64
