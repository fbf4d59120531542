"""Buckets of a hub keep the contract of a source and of a bucket, against a double that the real client lists and reads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from huggingface_hub import BucketFile, HfApi, HfFileSystem, constants
from huggingface_hub.errors import BucketNotFoundError
from huggingface_hub.utils import _detect_agent

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    SourceChangedError,
    SourceNotFoundError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.source.uri import Patterns, literal_prefixes, select
from tests.contract.access_contract import SESAME, Access, AccessContract
from tests.contract.bucket_contract import Bucket, BucketContract
from tests.contract.opening import BucketUpstream, open_hub
from tests.contract.source_contract import (
    CONTENT,
    SourceContract,
    Upstream,
    listed,
    listed_within,
    only_file,
    seen_before,
)
from tests.doubles.content import Content, GeneratedContent
from tests.doubles.faults import Fault, altered, answer, drop, truncate
from tests.doubles.hub import Hub
from tests.doubles.ranges import read_range

PAGE = 10
WEIGHTS = "hf://buckets/org/weights"
LARGE = GeneratedContent(CHUNK_SIZE + 1)
FILES: dict[str, Content] = {
    "logs/a b+%ü.txt": CONTENT,
    "logs_existing/b.txt": b"b",
    "logs.txt": b"txt",
    "model/empty": b"",
    "model/deep/weights.safetensors": LARGE,
}


def bucket_of(hub: Hub, folder: str = "", *, sends_bytes: bool = False) -> BucketUpstream:
    """A private one, read by its owner."""
    bucket = hub.bucket("org/weights", private=True, sends_bytes=sends_bytes)
    return BucketUpstream(bucket, lambda prefix: open_hub(hub, f"{WEIGHTS}/{prefix}", hub.token), folder)


@pytest.fixture
def filled(hub: Hub) -> Hub:
    hub.bucket("org/weights", private=True).put(FILES)
    return hub


class TestFolderOfHub(SourceContract):
    @pytest.fixture
    def upstream(self, hub: Hub) -> Upstream:
        return bucket_of(hub, "models/ü/a b+c%/")


class TestFolderBehindMirrorOfHub(SourceContract):
    @pytest.fixture
    def upstream(self, hub: Hub) -> Upstream:
        return bucket_of(hub, "models/", sends_bytes=True)


class TestBucketOfHub(BucketContract):
    keys_of_several_pages: ClassVar[int] = 2 * PAGE + 1

    @pytest.fixture
    def bucket(self, hub: Hub) -> Bucket:
        return bucket_of(hub)


class TestAccessToBucketOfHub(AccessContract):
    denial = SourceNotFoundError  # the hub tells nobody else that a private bucket exists

    @pytest.fixture
    def access(self, hub: Hub) -> Access:
        for name in ("public", "private"):
            hub.bucket(f"org/{name}", private=name == "private").put({"a.txt": b"x"})
        tokens = {"private": hub.token, "wrong key": f"hf_{SESAME}", "denied": hub.stranger_token, "missing": hub.token}
        return lambda way: open_hub(
            hub, f"hf://buckets/org/{way if way in ('public', 'missing') else 'private'}", tokens.get(way)
        )


# --- the double, as the real client sees it ---


def test_double__is_listed_described_and_read_by_the_real_client(filled: Hub) -> None:
    api = HfApi(endpoint=filled.url, token=filled.token)
    info = api.bucket_info("org/weights")
    assert (info.private, info.total_files) == (True, len(FILES))
    listed_files = [one for one in api.list_bucket_tree("org/weights", recursive=True) if isinstance(one, BucketFile)]
    assert [one.path for one in listed_files] == sorted(FILES)
    below = api.list_bucket_tree("org/weights", "logs", recursive=True)
    assert [one.path for one in below] == sorted(name for name in FILES if name.startswith("logs"))
    top = api.list_bucket_tree("org/weights")
    assert [(one.type, one.path) for one in top] == [
        ("file", "logs.txt"), ("directory", "logs"), ("directory", "logs_existing"), ("directory", "model"),
    ]  # fmt: skip

    [described] = api.get_bucket_paths_info("org/weights", ["logs.txt", "logs", "none"])
    metadata = api.get_bucket_file_metadata("org/weights", "logs.txt")
    assert (
        (described.size, described.xet_hash)
        == (metadata.size, metadata.xet_file_data.file_hash)
        == (3, described.xet_hash)
    )


def test_double__serves_whole_files_and_ranges_to_the_real_file_system(filled: Hub) -> None:
    files = HfFileSystem(endpoint=filled.url, token=filled.token, skip_instance_cache=True)
    assert files.find("buckets/org/weights") == [f"buckets/org/weights/{name}" for name in sorted(FILES)]
    with files.open("buckets/org/weights/logs/a b+%ü.txt") as file:
        assert file.read() == CONTENT
    middle = files.cat_file("buckets/org/weights/model/deep/weights.safetensors", CHUNK_SIZE - 2, CHUNK_SIZE + 1)
    assert middle == LARGE.read(CHUNK_SIZE - 2, CHUNK_SIZE + 1)
    with pytest.raises(FileNotFoundError):
        files.ls("buckets/org/weights/log")


@pytest.mark.parametrize("token", ["hf_stranger", False])
def test_double__hides_a_private_bucket_from_the_real_client(filled: Hub, token: str | bool) -> None:
    api = HfApi(endpoint=filled.url, token=token)
    calls: tuple[Callable[[], object], ...] = (
        lambda: api.bucket_info("org/weights"),
        lambda: list(api.list_bucket_tree("org/weights")),
        lambda: list(api.get_bucket_paths_info("org/weights", ["logs.txt"])),
    )
    for call in calls:
        with pytest.raises(BucketNotFoundError):
            call()


# --- requests ---


def targets(hub: Hub) -> list[tuple[str, str]]:
    found = [(request.method, request.target) for request in hub.log.find(origin="hub")]
    hub.log.clear()
    return found


async def test_source__sends_the_requests_of_the_real_client(filled: Hub) -> None:
    name = "model/deep/weights.safetensors"
    api = HfApi(endpoint=filled.url, token=filled.token)
    list(api.get_bucket_paths_info("org/weights", ["model"]))
    list(api.list_bucket_tree("org/weights", "model/", recursive=True))
    api.get_bucket_file_metadata("org/weights", name)
    expected = targets(filled)
    async with open_hub(filled, f"{WEIGHTS}/model", filled.token) as source:
        await source.locate((await listed(source))["deep/weights.safetensors"])
    assert targets(filled) == expected


async def test_listing__requests_a_page_when_the_page_before_it_is_used_up(hub: Hub) -> None:
    hub.bucket("org/weights").put({f"{number:02}.txt": b"x" for number in range(2 * PAGE)})
    hub.links_to = hub.cdn_url  # a mirror of the hub passes on the hub's links
    async with open_hub(hub, WEIGHTS) as source:
        files = source.list(await source.resolve())
        for _ in range(PAGE):
            await anext(files)
        assert hub.log.count("/tree") == 1
        assert len([file async for file in files]) == PAGE
    assert hub.log.count("/tree") == 2
    assert hub.log.find(origin="cdn") == []


async def test_patterns__narrow_the_listing_to_their_beginnings(hub: Hub) -> None:
    names = [f"{folder}/{number:02}.bin" for folder in ("test", "train") for number in range(2 * PAGE)]
    everything = [*names, ".hidden", "..odd", "config.json"]
    hub.bucket("org/weights").put(dict.fromkeys(everything, b"x"))
    for allow, expected, requests in (
        ("train/0*.bin", [name for name in names if name.startswith("train/0")], 1),
        ("*.json", ["config.json"], 5),
        (".*", ["..odd", ".hidden"], 5),  # "." and ".." are no segments of an address: the whole bucket is listed
        ("..*", ["..odd"], 5),
    ):
        hub.log.clear()
        async with open_hub(hub, WEIGHTS) as source:
            patterns = Patterns(allow=(allow,))
            beginnings = literal_prefixes(patterns)
            found = await listed_within(source, *beginnings)
        assert found == sorted(name for name in everything if name.startswith(beginnings))
        assert list(select(found, patterns).paths) == expected
        assert hub.log.count("/tree") == requests, allow


async def test_location__is_on_the_cdn_without_the_token_and_no_request_speaks_xet(filled: Hub) -> None:
    async with open_hub(filled, f"{WEIGHTS}/model/", filled.token) as source:
        file = (await listed(source))["deep/weights.safetensors"]
        filled.log.clear()
        location = await source.locate(file)
        assert [(request.method, request.status) for request in filled.log.find()] == [("HEAD", 302)]
        assert (location.url.startswith(filled.cdn_url), location.headers) == (True, ())
        filled.expire_links()
        assert read_range(location, 0, 4).status == 403
        location = await source.locate(file)
    assert read_range(location, CHUNK_SIZE - 2, CHUNK_SIZE + 1).content == LARGE.read(CHUNK_SIZE - 2, CHUNK_SIZE + 1)
    assert filled.log.count("xet-read-token") == 0


async def test_telemetry_of_the_client__reaches_no_server(
    filled: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", filled.url)
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "harnesses.json"))
    for prefix in ("logs/", "logs.txt"):  # requests without and with the client's own method
        monkeypatch.setattr(_detect_agent, "_registry", None)
        async with open_hub(filled, f"{WEIGHTS}/{prefix}", filled.token) as source:
            assert len(await listed(source)) == 1
    assert filled.log.count("agent-harnesses") == 0


# --- versions ---


async def test_file_uploaded_again__with_the_same_bytes_is_unchanged(hub: Hub) -> None:
    bucket, found = hub.bucket("org/weights"), []
    for content in (CONTENT, CONTENT, CONTENT[::-1]):
        bucket.put({"a.bin": content})
        async with open_hub(hub, WEIGHTS) as source:
            found.append(await only_file(source))
    assert found[0] == found[1]
    assert found[1].identity != found[2].identity
    assert found[1].version != found[2].version


@pytest.mark.parametrize(("now", "said"), [
    (b"after!", "its xet hash changed"), (b"longer than before", "listed with 6 bytes, now 18"), (None, "no longer has it"),
])  # fmt: skip
@pytest.mark.parametrize("sends_bytes", [False, True])
async def test_file_that_changes_after_the_listing__is_source_changed(
    hub: Hub, now: bytes | None, said: str, *, sends_bytes: bool
) -> None:
    bucket = hub.bucket("org/weights", sends_bytes=sends_bytes)
    bucket.put({"a.bin": b"before"})
    async with open_hub(hub, WEIGHTS) as source:
        file = await only_file(source)
        bucket.put({"a.bin": now})
        with pytest.raises(SourceChangedError, match=f"'a.bin'.*{said}"):
            await source.locate(file)


async def test_content__belongs_to_the_organisation_also_of_a_public_bucket(hub: Hub) -> None:
    hub.bucket("org/weights").put({"a.bin": b"x"})
    async with open_hub(hub, WEIGHTS) as source:
        assert (await only_file(source)).identity.scope == "organisation:acme"


# --- failures ---

HTML = b"<html>a proxy's page</html>"
FAILURES = [
    (answer(500), UpstreamUnavailableError, "answered 500"),
    (answer(429, {"Retry-After": "7"}), UpstreamRateLimitedError, "429"),
    (answer(401), AuthRequiredError, "does not exist, or it is private"),
    (answer(403), AuthRequiredError, "answered 403"),
    (answer(404, {"X-Error-Code": "RepoNotFound"}), SourceNotFoundError, "does not exist, or it is private"),
    (answer(404), SourceNotFoundError, "answered 404"),
    (answer(200, body=HTML), UpstreamUnavailableError, "does not look like a hub's"),
    (answer(200, body=b'{"error": "x"}'), UpstreamUnavailableError, "does not look like a hub's"),
    *((answer(200, body=json.dumps([{"type": "file", "path": path, "size": size, "xetHash": xet_hash}]).encode()),
        UpstreamUnavailableError, "does not look like a hub's")
        for path, size, xet_hash in ((1, 1, "0" * 64), ("", 1, "0" * 64), ("a", -1, "0" * 64), ("a", "1", "0" * 64), ("a", 1, "0"), ("a", 1, 1))),
    (drop(), UpstreamUnavailableError, "did not answer"),
    (truncate(10), UpstreamUnavailableError, "did not answer"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "expected", "said"), FAILURES)
@pytest.mark.parametrize(("query", "before"), [("/tree", 0), ("cursor=", PAGE)])
async def test_failing_page__is_requested_once_and_mapped(
    hub: Hub, fault: Fault, expected: type[BdnError], said: str, query: str, before: int
) -> None:
    hub.bucket("org/weights").put({f"{number:02}.txt": b"x" for number in range(2 * PAGE)})
    hub.fail(fault, query, times=None)
    assert len(await seen_before(expected, said, open_hub(hub, WEIGHTS))) == before
    assert hub.log.count(query) == 1


@pytest.mark.parametrize(("fault", "expected", "said"), FAILURES)
async def test_failing_question_for_one_name__is_mapped(
    hub: Hub, fault: Fault, expected: type[BdnError], said: str
) -> None:
    hub.bucket("org/weights").put({"a": b"x"})
    hub.fail(fault, "/paths-info", times=None)
    assert await seen_before(expected, said, open_hub(hub, f"{WEIGHTS}/a")) == []
    assert hub.log.count("/paths-info") == 1


@pytest.mark.parametrize(("fault", "expected", "said"), [
    *FAILURES[:6],
    (answer(404, {"X-Error-Code": "EntryNotFound"}), SourceChangedError, "no longer has it"),
    (altered({"X-Xet-Hash": ""}), SourceChangedError, "xet hash"),
    (answer(302, {"Location": "https://cdn.example/x"}), UpstreamUnavailableError, "no X-Xet-Hash"),
])  # fmt: skip
async def test_failing_location__is_mapped(hub: Hub, fault: Fault, expected: type[BdnError], said: str) -> None:
    hub.bucket("org/weights").put({"a.bin": b"x"})
    async with open_hub(hub, WEIGHTS) as source:
        file = await only_file(source)
        hub.fail(fault, "/resolve/", times=None)
        with pytest.raises(expected, match=said):
            await source.locate(file)
    assert hub.log.count("/resolve/") == 1


async def test_prefix_without_files__is_an_empty_listing_also_where_the_hub_answers_404(hub: Hub) -> None:
    hub.bucket("org/weights").put({"model-2/a": b"x"})
    for fault in (None, answer(404, {"X-Error-Code": "EntryNotFound"})):
        if fault:
            hub.fail(fault, "/tree", times=None)
        async with open_hub(hub, f"{WEIGHTS}/model") as source:
            assert await listed(source) == {}
