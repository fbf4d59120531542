"""HuggingFaceSource keeps the contract of a Source, against a double that the real client cannot tell from a hub."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from huggingface_hub import get_session

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import SourceNotFoundError
from bdn.core.source.upstream import Checksum, ChecksumKind
from bdn.sources.huggingface.session import one_attempt
from bdn.sources.huggingface.tree import at_endpoint
from tests.contract.access_contract import SESAME, Access, AccessContract
from tests.contract.opening import Opened, open_hub
from tests.contract.source_contract import CONTENT, SourceContract, Upstream, listed
from tests.doubles.content import Content, GeneratedContent, git_blob_of, sha256_of
from tests.doubles.hub import Hub
from tests.doubles.hub_repository import HubRepository
from tests.doubles.ranges import read_range
from tests.support.network.egress import LOOPBACK

PAGE = 3
LARGE = GeneratedContent(CHUNK_SIZE + 1)


@dataclass(frozen=True)
class HubUpstream:
    hub: Hub
    repository: HubRepository
    token: str | None = None

    def fill(self, files: Mapping[str, bytes]) -> None:
        self.repository.commit(files)

    def open(self) -> Opened:
        kind = "" if self.repository.kind == "model" else f"{self.repository.kind}s/"
        return open_hub(self.hub, f"hf://{kind}{self.repository.repo_id}", self.token)


class TestPublicModel(SourceContract):
    @pytest.fixture
    def upstream(self, hub: Hub) -> Upstream:
        return HubUpstream(hub, hub.repo("org/model"))


class TestPrivateDataset(SourceContract):
    @pytest.fixture
    def upstream(self, hub: Hub) -> Upstream:
        return HubUpstream(hub, hub.repo("org/set", kind="dataset", private=True), hub.token)


class TestGatedSpace(SourceContract):
    @pytest.fixture
    def upstream(self, hub: Hub) -> Upstream:
        repository = hub.repo("org/space", kind="space", gated=True)
        repository.allow(hub.stranger_token)
        return HubUpstream(hub, repository, hub.stranger_token)


class TestXetModel(SourceContract):
    """Backed by xet, and read through the hub's bridge for those who do not speak it."""

    @pytest.fixture
    def upstream(self, hub: Hub) -> Upstream:
        repository = hub.repo("org/xet")
        repository.is_xet = True
        return HubUpstream(hub, repository)


async def test_a_file_of_xet_is_read_by_ranges_and_known_by_its_sha256(hub: Hub) -> None:
    repository = hub.repo("org/xet")
    repository.is_xet = True
    repository.commit({"model.safetensors": LARGE})
    async with open_hub(hub, "hf://org/xet") as source:
        file = (await listed(source))["model.safetensors"]
        location = await source.locate(file)
    assert file.checksum == Checksum(ChecksumKind.SHA256, LARGE.sha256)
    assert location.url.startswith(hub.cdn_url)
    assert read_range(location, CHUNK_SIZE - 2, CHUNK_SIZE + 1).content == LARGE.read(CHUNK_SIZE - 2, CHUNK_SIZE + 1)
    assert [request.status for request in hub.log.find("/resolve/", method="HEAD")] == [302]
    assert hub.log.count("xet-read-token") == 0


class TestAccess(AccessContract):
    denial = SourceNotFoundError  # the hub tells nobody else that a private repository exists

    @pytest.fixture
    def access(self, hub: Hub) -> Access:
        hub.repo("org/public").commit({"a.txt": b"x"})
        hub.repo("org/private", private=True).commit({"a.txt": b"x"})
        tokens = {"private": hub.token, "wrong key": f"hf_{SESAME}", "denied": hub.stranger_token, "missing": hub.token}
        return lambda way: open_hub(
            hub, f"hf://org/{way if way in ('public', 'missing') else 'private'}", tokens.get(way)
        )


@pytest.mark.parametrize("revision", ["", "@main", "@dev", "@v1.0", "@refs/pr/1", "@feature/slash"])
async def test_every_kind_of_revision_resolves_to_the_commit_that_it_names(hub: Hub, revision: str) -> None:
    repo = hub.repo("org/model")
    commits = {"@v1.0": repo.commit({"f": b"tagged"})}
    repo.tag("v1.0")
    commits["@dev"] = repo.commit({"f": b"dev"}, branch="dev")
    commits["@feature/slash"] = repo.commit({"f": b"slash"}, branch="feature/slash")
    commits["@refs/pr/1"] = repo.commit({"f": b"request"}, branch="refs/pr/1")
    commits["@main"] = commits[""] = repo.commit({"f": b"main"})
    async with open_hub(hub, f"hf://org/model{revision}") as source:
        assert (await source.resolve()).revision == commits[revision]


async def test_an_older_commit_is_listed_and_read_as_it_was(hub: Hub) -> None:
    repo = hub.repo("org/model")
    old = repo.commit({"f.bin": b"old content", "gone.txt": b"x"})
    repo.commit({"f.bin": b"new", "gone.txt": None})
    async with open_hub(hub, f"hf://org/model@{old}") as source:
        files = await listed(source)
        location = await source.locate(files["f.bin"])
    assert set(files) == {"f.bin", "gone.txt"}
    assert read_range(location, 0, 11).content == b"old content"


async def test_a_listing_stays_at_its_commit_while_the_branch_moves(hub: Hub) -> None:
    repo = hub.repo("org/model")
    repo.commit({"f.bin": b"old"})
    async with open_hub(hub, "hf://org/model@main") as source:
        resolution = await source.resolve()
        repo.commit({"f.bin": b"newer", "more.bin": b"x"})
        files = [file async for file in source.list(resolution)]
        location = await source.locate(files[0])
    assert [(file.path, file.size, file.version) for file in files] == [("f.bin", 3, resolution.revision)]
    assert read_range(location, 0, 3).content == b"old"


async def test_lfs_files_carry_their_sha256_and_others_their_git_blob(hub: Hub) -> None:
    hub.repo("org/model").commit({"model.safetensors": CONTENT, "config.json": b"{}"})
    async with open_hub(hub, "hf://org/model") as source:
        files = await listed(source)
    assert files["model.safetensors"].checksum == Checksum(ChecksumKind.SHA256, sha256_of(CONTENT))
    assert files["config.json"].checksum == Checksum(ChecksumKind.GIT_BLOB, git_blob_of(b"{}"))


async def test_public_content_is_shared_and_private_and_gated_content_belongs_to_the_organisation(hub: Hub) -> None:
    scopes = {}
    for name, private, gated in (("open", False, False), ("private", True, False), ("gated", False, True)):
        hub.repo(f"org/{name}", private=private, gated=gated).commit({"f": b"x"})
        async with open_hub(hub, f"hf://org/{name}", hub.token) as source:
            scopes[name] = (await listed(source))["f"].identity.scope
    assert scopes == {"open": "public", "private": "organisation:acme", "gated": "organisation:acme"}


async def test_a_resolution_from_elsewhere_does_not_make_private_content_public(hub: Hub) -> None:
    hub.repo("org/private", private=True).commit({"f": b"x"})
    async with open_hub(hub, "hf://org/private", hub.token) as source:
        resolution = await source.resolve()
    async with open_hub(hub, "hf://org/private", hub.token) as source:
        assert [file.identity.scope async for file in source.list(resolution)] == ["organisation:acme"]


async def test_the_token_goes_to_the_hub_and_never_to_the_cdn(hub: Hub) -> None:
    contents: dict[str, Content] = {"model.safetensors": LARGE, "small.safetensors": CONTENT, "config.json": b"{}"}
    hub.repo("org/private", private=True).commit(contents)
    async with open_hub(hub, "hf://org/private", hub.token) as source:
        files = await listed(source)
        large, *small = [await source.locate(files[name]) for name in contents]
    assert large.url.startswith(hub.cdn_url)
    assert large.headers == ()
    assert read_range(large, 0, 4).status == 206
    for location in small:  # the hub redirects to its CDN where it has to
        assert location.url.startswith(hub.url)
        assert location.headers == (("Authorization", f"Bearer {hub.token}"),)
        assert read_range(location, 0, 2).status == 206


async def test_a_file_of_one_chunk_costs_no_request_to_locate(hub: Hub) -> None:
    hub.repo("org/model").commit({"one.safetensors": GeneratedContent(CHUNK_SIZE), "two.safetensors": LARGE})
    async with open_hub(hub, "hf://org/model") as source:
        files = await listed(source)
        hub.log.clear()
        for name, requests in (("one.safetensors", 0), ("two.safetensors", 1)):
            await source.locate(files[name])
            assert hub.log.count() == requests


async def test_a_file_can_be_located_again_when_its_link_has_expired(hub: Hub) -> None:
    hub.repo("org/model").commit({"model.safetensors": LARGE})
    async with open_hub(hub, "hf://org/model") as source:
        file = (await listed(source))["model.safetensors"]
        location = await source.locate(file)
        hub.expire_links()
        assert read_range(location, 0, 4).status == 403
        assert read_range(await source.locate(file), 0, 4).content == LARGE.read(0, 4)


async def test_a_file_of_twenty_gigabytes_is_read_from_its_middle(hub: Hub) -> None:
    content = GeneratedContent(20 * 1024**3)
    middle = 10 * 1024**3 + 123
    hub.repo("org/model").commit({"model.safetensors": content.declaring("0" * 64)})
    async with open_hub(hub, "hf://org/model") as source:
        file = (await listed(source))["model.safetensors"]
        location = await source.locate(file)
    assert file.size == 20 * 1024**3
    assert read_range(location, middle, middle + 1000).content == content.read(middle, middle + 1000)


async def test_an_unchanged_public_source_costs_one_request_and_one_per_page(hub: Hub) -> None:
    hub.repo("org/model").commit({f"{number:02}.txt": b"x" for number in range(10)})
    async with open_hub(hub, "hf://org/model") as source:
        await listed(source)
    assert [request.method for request in hub.log.find()] == ["GET"] * (1 + 4)


async def test_a_listing_asks_for_no_more_pages_than_are_consumed(hub: Hub) -> None:
    hub.repo("org/model").commit({f"{number:02}.txt": b"x" for number in range(30)})
    async with open_hub(hub, "hf://org/model") as source:
        resolution = await source.resolve()
        async for _ in source.list(resolution):
            break
    assert hub.log.count("/tree/") == 1


async def test_the_next_page_is_requested_at_the_configured_endpoint_whatever_host_its_link_names(hub: Hub) -> None:
    # A mirror of the hub passes the hub's Link headers on.
    hub.repo("org/model", private=True).commit({f"{number:02}.txt": b"x" for number in range(10)})
    hub.links_to = hub.cdn_url  # another host
    async with open_hub(hub, "hf://org/model", hub.token) as source:
        assert len(await listed(source)) == 10
    assert hub.log.find(origin="cdn") == []


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (
            "https://huggingface.co/api/models/o/r/tree/c?cursor=a%3D",
            "http://mirror:81/hub/api/models/o/r/tree/c?cursor=a%3D",
        ),
        ("https://huggingface.co/hub/api/t?cursor=1", "http://mirror:81/hub/api/t?cursor=1"),
        ("http://mirror:81/hub/api/t?cursor=1", "http://mirror:81/hub/api/t?cursor=1"),
        ("https://mirror:81/hub/api/t?cursor=1", "http://mirror:81/hub/api/t?cursor=1"),
        ("http://mirror/hub/api/t?cursor=1", "http://mirror:81/hub/api/t?cursor=1"),
    ],
)
def test_a_link_keeps_path_and_query_below_the_endpoint(address: str, expected: str) -> None:
    assert at_endpoint(address, "http://mirror:81/hub") == expected


async def test_no_request_of_the_client_carries_the_token_to_another_origin(hub: Hub) -> None:
    # The client itself forwards it to any host that it takes for a hub's.
    with one_attempt(LOOPBACK, hub.url):
        await asyncio.to_thread(get_session().get, f"{hub.cdn_url}/x", headers={"Authorization": "Bearer t"})
    [request] = hub.log.find(origin="cdn")
    assert "authorization" not in request.headers
