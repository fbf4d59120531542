"""The double refuses and fails as the real hub does, and on command; the real client notices and copes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from huggingface_hub import HfApi, close_session, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.doubles.content import PERIOD, Content, GeneratedContent
from tests.doubles.faults import answer, drop, flip_byte, ignore_range, rate_limited, stall, truncate
from tests.doubles.hub import Hub
from tests.doubles.real_client import confine

LARGE = GeneratedContent(3_000_000, seed=1)
FILES: dict[str, Content] = {"config.json": b"{}", "nested/a.txt": b"hello", "model-00001.safetensors": LARGE}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    confine(tmp_path, monkeypatch)
    with Hub(page_size=2) as hub:
        yield hub
    close_session()


@pytest.fixture
def repo(hub: Hub) -> None:
    hub.repo("org/model").commit(FILES)


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
