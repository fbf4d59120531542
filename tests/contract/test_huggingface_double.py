"""The hub double's API beside listings and files, as the real client sees it."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile, RepoFolder
from huggingface_hub.utils._xet import (
    XetConnectionInfo,
    XetFileData,
    XetTokenType,
    refresh_xet_connection_info,
    xet_connection_info_refresh_url,
)

from tests.doubles.hub import EXPANDED_PAGE, Hub
from tests.doubles.hub_repository import HubRepository, Kind

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "nested/deeper/a b+%ü.txt": b"x", "nested/empty": b""}
KINDS: tuple[Kind, ...] = ("model", "dataset", "space", "kernel")


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub() as double:
        yield double


@pytest.fixture(autouse=True)
def empty(hub: Hub) -> None:
    hub.clear()


@pytest.fixture
def repository(hub: Hub) -> HubRepository:
    repository = hub.repo("org/model")
    repository.commit(FILES)
    return repository


@pytest.fixture
def api(hub: Hub) -> HfApi:
    return HfApi(endpoint=hub.url, token=False)


@pytest.mark.parametrize("kind", KINDS)
def test_paths_info__of_files_and_folders__leaves_out_what_does_not_exist(hub: Hub, api: HfApi, kind: Kind) -> None:
    hub.repo("org/it", kind=kind).commit(FILES)

    found = api.get_paths_info("org/it", [*FILES, "nested/deeper", "none"], repo_type=kind)

    files = {one.path: one.size for one in found if isinstance(one, RepoFile)}
    assert files == {path: len(content) for path, content in FILES.items()}
    assert [one.path for one in found if isinstance(one, RepoFolder)] == ["nested/deeper"]
    assert [one.last_commit for one in found] == [None] * len(found)


def test_paths_info__at_a_missing_revision__is_revision_not_found(api: HfApi, repository: HubRepository) -> None:
    with pytest.raises(RevisionNotFoundError):
        api.get_paths_info("org/model", "config.json", revision="none")
    with pytest.raises(RepositoryNotFoundError):
        api.get_paths_info("org/none", "config.json")


def test_expanded_entries__name_the_commit_that_changed_them_last(api: HfApi, repository: HubRepository) -> None:
    [first] = repository.commits
    second = repository.commit({"nested/deeper/more": b"y"})
    expected = {"config.json": first, "nested": second, "nested/deeper": second, "nested/empty": first}

    described = api.get_paths_info("org/model", list(expected), expand=True)
    listed = list(api.list_repo_tree("org/model", recursive=True, expand=True))

    for entries in (described, listed):
        commits = {one.path: one.last_commit.oid for one in entries if one.last_commit}
        assert {path: commits[path] for path in expected} == expected
    assert [one.security.safe for one in described if isinstance(one, RepoFile) and one.security] == [True, True]


def test_expanded_listing__has_pages_of_fifty(hub: Hub, api: HfApi) -> None:
    hub.repo("org/model").commit({f"{number:03}": b"" for number in range(2 * EXPANDED_PAGE + 1)})

    listed = list(api.list_repo_tree("org/model", expand=True))

    assert (len(listed), hub.log.count("/tree/")) == (2 * EXPANDED_PAGE + 1, 3)


def test_refs__are_branches_tags_conversions_and_on_request_pull_requests(
    api: HfApi, repository: HubRepository
) -> None:
    main = repository.refs["refs/heads/main"]
    repository.tag("v1")
    slash = repository.commit({"a": b""}, branch="feature/slash")
    parquet = repository.commit({"a": b""}, branch="refs/convert/parquet")
    proposed = repository.commit({"a": b""}, branch="refs/pr/1")

    found = api.list_repo_refs("org/model", include_pull_requests=True)

    assert {one.name: one.target_commit for one in found.branches} == {"main": main, "feature/slash": slash}
    assert {one.name: one.target_commit for one in found.tags} == {"v1": main}
    assert {one.name: one.target_commit for one in found.converts} == {"parquet": parquet}
    assert {one.ref: one.target_commit for one in found.pull_requests or ()} == {"refs/pr/1": proposed}
    assert api.list_repo_refs("org/model").pull_requests is None


def test_commits__are_those_before_a_revision_newest_first(hub: Hub, api: HfApi, repository: HubRepository) -> None:
    shas = [*repository.commits, *(repository.commit({"n": str(number).encode()}) for number in range(EXPANDED_PAGE))]
    proposed = repository.commit({"n": b"proposed"}, branch="refs/pr/1")

    assert [one.commit_id for one in api.list_repo_commits("org/model")] == shas[::-1]
    assert hub.log.count("/commits/main") == 2
    assert [one.commit_id for one in api.list_repo_commits("org/model", revision=shas[1])] == shas[1::-1]
    assert next(iter(api.list_repo_commits("org/model", revision="refs/pr/1"))).commit_id == proposed
    with pytest.raises(RevisionNotFoundError):
        api.list_repo_commits("org/model", revision="none")


def test_discussions__are_the_pull_requests(hub: Hub, api: HfApi, repository: HubRepository) -> None:
    repository.commit({"a": b""}, branch="refs/pr/2")

    [found] = api.get_repo_discussions("org/model")

    assert (found.num, found.is_pull_request, found.git_reference) == (2, True, "refs/pr/2")


def test_whoami__is_the_name_of_the_token(hub: Hub, api: HfApi) -> None:
    tokens = (hub.token, hub.stranger_token, hub.user("carol"))
    assert [api.whoami(token=token)["name"] for token in tokens] == ["owner", "stranger", "carol"]
    with pytest.raises(HfHubHTTPError) as refused:
        api.whoami(token="hf_wrong")
    assert refused.value.response.status_code == 401
    assert httpx2.get(f"{hub.url}/api/whoami-v2", trust_env=False).status_code == 401


def test_xet_token__is_given_for_xet_repositories_to_callers_with_access(hub: Hub) -> None:
    repository = hub.repo("org/xet", gated=True)
    repository.is_xet = True
    sha = repository.commit(FILES)
    hub.repo("org/plain").commit(FILES)

    def connection(repo_id: str, token: str, revision: str = sha) -> XetConnectionInfo:
        route = xet_connection_info_refresh_url(
            token_type=XetTokenType.READ, repo_id=repo_id, repo_type="model", revision=revision, endpoint=hub.url
        )
        headers = {"Authorization": f"Bearer {token}"}
        return refresh_xet_connection_info(file_data=XetFileData("0" * 64, route), headers=headers)

    given = connection("org/xet", hub.token)

    assert given.endpoint.startswith(hub.cdn_url)
    with pytest.raises(GatedRepoError):
        connection("org/xet", hub.stranger_token)
    with pytest.raises(HfHubHTTPError, match="404"):
        connection("org/plain", hub.token, "main")


def test_kernel__is_described_listed_and_read(hub: Hub, tmp_path: Path) -> None:
    sha = hub.repo("org/kernel", kind="kernel").commit(FILES)
    api = HfApi(endpoint=hub.url, token=False)

    assert api.kernel_info("org/kernel").sha == sha
    found = api.snapshot_download("org/kernel", repo_type="kernel", cache_dir=tmp_path)

    assert {path: (Path(found) / path).read_bytes() for path in FILES} == FILES


def test_file_system__lists_describes_and_reads(hub: Hub, repository: HubRepository) -> None:
    files = HfFileSystem(endpoint=hub.url, token=False, skip_instance_cache=True)

    assert sorted(files.find("org/model")) == sorted(f"org/model/{path}" for path in FILES)
    assert files.info("org/model/nested/empty")["size"] == 0
    assert files.cat_file("org/model/model.safetensors", 1, 3) == b"ei"
    with pytest.raises(FileNotFoundError):
        files.info("org/model/none")
