"""Whatever upstreams list and whatever bytes parsers get: read, or refused with a typed error, and soon."""

from __future__ import annotations

import copy
import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from huggingface_hub import close_session

from bdn.core.chunk import normalise_path
from bdn.core.errors import BdnError
from bdn.core.source.upstream import Listing
from bdn.core.source.uri import WeightsSource, parse_source
from bdn.mirror.ingest.survey import Selector
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import Secret, SourceContext
from tests.doubles.faults import Script
from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.request_log import RequestLog
from tests.fuzz.mutation import all_of
from tests.fuzz.targets import TARGETS, Target
from tests.support.network.egress import LOOPBACK
from tests.support.promises.tally import FULL, Tally, at_scale

pytestmark = pytest.mark.promise("hostile-input")
SHA = "a" * 40
MOST_MIB = 400  # that a listing which never ends may cost
KEYS = json.dumps({"aws_access_key_id": "a", "aws_secret_access_key": "b"})
JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, float("inf"), 2**70, 10**400, "", "x", "-5", "1_0", "٣", "\ud800", "a\0b", "../x", "/abs", "a\\b", "a//b", "a/./b",
    "a" * 70_000, "a/" * 5000 + "b", [], {}, [[]], {"a": 1}, "line\nbreak", "\u202e", "CON", ".", "..",
)  # fmt: skip


LFS = {"oid": "c" * 64, "size": 9, "pointerSize": 1}
HUB_ENTRIES: list[dict[str, Any]] = [
    {"type": "file", "path": "a/large.bin", "size": 9, "oid": "b" * 40, "lfs": LFS},
    {"type": "directory", "path": "a", "oid": "e" * 40},
    {"type": "file", "path": "a/config.json", "size": 3, "oid": "d" * 40},
]
GCS_ENTRY = {"generation": "17", "size": "3", "crc32c": "AAAAAA==", "md5Hash": "1B2M2Y8AsgTpgAmy7PhCfg=="}
S3_ENTRY = {"ETag": '"d41d8cd98f00b204e9800998ecf8427e"', "Size": "3"}
LISTED: dict[str, list[dict[str, Any]]] = {
    "hf://o/m": HUB_ENTRIES,
    "gs://bucket": [{"name": name, **GCS_ENTRY} for name in ("data/a.bin", "data/b")],
    "s3://bucket": [{"Key": name, **S3_ENTRY} for name in ("data/a.bin", "data/b")],
}
FIELDS = {"hf": ("path", "size"), "gs": ("name", "size"), "s3": ("Key", "Size")}  # an entry's name, and its size


def page(uri: str, entries: list[dict[str, Any]], turn: str | None = None) -> Any:
    """What lists these; with ``turn`` the next page is to be asked for."""
    if uri.startswith("hf"):
        return entries
    if uri.startswith("gs"):
        return {"kind": "storage#objects", "items": entries, "nextPageToken": turn}
    more = {"IsTruncated": "true", "NextContinuationToken": turn} if turn else {"IsTruncated": "false"}
    return {**more, "EncodingType": "url", "Contents": entries}


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a document."""
    if isinstance(document, dict | list):
        yield from (
            place
            for key in (document if isinstance(document, dict) else range(len(document)))
            for place in [(*path, key)]
        )
        for key in document if isinstance(document, dict) else range(len(document)):
            yield from places(document[key], (*path, key))


def altered(document: Any, number: int) -> Any:
    """The document with one to three of its values replaced by junk, dropped, or doubled."""
    random, document = Random(number), copy.deepcopy(document)
    for _ in range(random.choice((1, 1, 2, 3))):
        found = list(places(document))
        if not found:
            return document
        *way, last = random.choice(found)
        parent = document
        for step in way:
            parent = parent[step]
        if random.randrange(4):
            parent[last] = random.choice(JUNK)
        elif isinstance(parent, list):
            parent.append(copy.deepcopy(parent[last]))
        else:
            del parent[last]
    return document


def xml(document: Any) -> bytes:
    """As ListObjectsV2 writes it; what XML cannot hold stands there all the same."""
    if not isinstance(document, dict):
        return str(document).encode("utf-8", "replace")
    text = "".join(
        f"<{name}>{part}</{name}>"
        for name, value in document.items()
        for part in ([_inner(one) for one in value] if isinstance(value, list) else [_inner(value)])
    )
    return f"<ListBucketResult>{text}</ListBucketResult>".encode("utf-8", "replace")


def _inner(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(f"<{name}>{_inner(part)}</{name}>" for name, part in value.items())
    return str(value)


class HostileUpstream:
    """A hub, S3 and GCS in one: whatever is listed there is ``listing``."""

    def __init__(self) -> None:
        self.listing: Callable[[Request], Answer] = lambda _: Answer(404)
        self._origin = Origin("hostile", self._respond, log=RequestLog(), script=Script())
        self.url = self._origin.url

    @contextmanager
    def running(self) -> Iterator[HostileUpstream]:
        with self._origin:
            yield self
        close_session()

    def _respond(self, request: Request) -> Answer:
        if "/api/models/" in request.target and "/tree/" not in request.target:
            return Answer(200, {"Content-Type": "application/json"}, json.dumps({"id": "o/m", "sha": SHA}).encode())
        return self.listing(request)

    def answer(self, uri: str, document: Any, turn: str | None = None) -> Answer:
        """With this page; a hub says in a header how to ask for the next one."""
        if uri.startswith("s3"):
            return Answer(200, {}, xml(document))
        headers = {"Content-Type": "application/json"}
        if uri.startswith("hf") and turn:
            link = f"{self.url}/api/models/o/m/tree/{SHA}?recursive=true&cursor={turn}"
            headers["Link"] = f'<{link}>; rel="next"'
        return Answer(200, headers, json.dumps(document).encode())

    async def listed(self, uri: str, limit: int = 1000) -> Listing:
        settings = UpstreamSettings(
            hf_endpoint=self.url, s3_endpoint_url=self.url, gcs_endpoint_url=self.url, egress=LOOPBACK
        )
        secret = Secret("keys", KEYS) if uri.startswith("s3:") else None
        wanted = WeightsSource(parse_source(uri), "/m")
        async with open_source(wanted.source, SourceContext("o", settings, secret)) as source:
            selected = await Selector(limit, 10**14).select(wanted, source, await source.resolve())
        return selected.files


@pytest.fixture
def upstream() -> Iterator[HostileUpstream]:
    with HostileUpstream().running() as running:
        yield running


@pytest.mark.parametrize("uri", LISTED)
async def test_a_listing_is_files_that_can_exist_or_an_error_that_says_what_is_wrong(
    uri: str, upstream: HostileUpstream, tally: Tally
) -> None:
    right = page(uri, LISTED[uri])
    upstream.listing = lambda _: upstream.answer(uri, right)
    assert len(await upstream.listed(uri)) == 2
    wrong: list[str] = []
    count = at_scale(20, 200) if uri.startswith("s3") else at_scale(150, 2000)  # a client of S3 takes long to open
    for number in range(count):
        answer = upstream.answer(uri, altered(right, number))
        upstream.listing = lambda _, answer=answer: answer  # type: ignore[misc]
        tally.add(scenarios=1)
        try:
            for file in await upstream.listed(uri):
                assert normalise_path(file.path) == file.path, file
                assert isinstance(file.size, int), file
                assert 0 <= file.size < 2**63, file
        except BdnError as error:
            tally.add(refused=1)
            if error.code == "INTERNAL":
                wrong.append(f"{number}: {error}")
        except Exception as error:
            wrong.append(f"{number}: {type(error).__name__}: {error!s:.200} for {answer.content!r:.600}")
    tally.add(wrong=len(wrong))
    assert wrong[:5] == []


@pytest.mark.parametrize("uri", LISTED)
async def test_a_listing_that_never_ends_is_left_at_the_limit(uri: str, upstream: HostileUpstream) -> None:
    """Ten million paths, or as many as somebody likes: a listing is read up to the limit and no further."""
    limit = at_scale(20_000, 300_000)
    asked, (name, _) = 0, FIELDS[uri[:2]]

    def endless(_: Request) -> Answer:
        nonlocal asked
        asked += 1
        entries = [{**LISTED[uri][-1], name: f"data/{asked:09}/{number:04}"} for number in range(1000)]
        return upstream.answer(uri, page(uri, entries, f"{asked}"), f"{asked}")

    upstream.listing = endless
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BdnError) as caught:
        await upstream.listed(uri, limit)
    assert caught.value.code == "LIMIT_EXCEEDED"
    assert asked <= limit // 1000 + 3
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024 < MOST_MIB * max(1, limit // 200_000)


@pytest.mark.parametrize("uri", LISTED)
async def test_a_listing_that_comes_back_to_itself_ends(uri: str, upstream: HostileUpstream) -> None:
    """The same page again and again, which says that there is more."""
    upstream.listing = lambda _: upstream.answer(uri, page(uri, LISTED[uri], "again"), "again")
    with pytest.raises(BdnError) as caught:
        await upstream.listed(uri)
    assert caught.value.code in {"LIMIT_EXCEEDED", "UPSTREAM_UNAVAILABLE", "INVALID_SOURCE"}


HUGE = {  # whether it is the entry's size or its name
    "a path of megabytes": (False, "a" * at_scale(1_000_000, 100_000_000), "INVALID_SOURCE"),
    "a hundred thousand folders": (False, "a/" * 100_000 + "b", "INVALID_SOURCE"),
    "a petabyte": (True, 10**15, "LIMIT_EXCEEDED"),
    "more than any disk counts": (True, 2**63, "LIMIT_EXCEEDED"),
}


@pytest.mark.parametrize("uri", LISTED)
@pytest.mark.parametrize("what", HUGE)
async def test_one_huge_entry_is_refused(uri: str, what: str, upstream: HostileUpstream) -> None:
    is_size, value, code = HUGE[what]
    *others, last = LISTED[uri]
    huge = {**last, FIELDS[uri[:2]][is_size]: value if uri.startswith("hf") else str(value)}
    upstream.listing = lambda _: upstream.answer(uri, page(uri, [*others, huge]))
    with pytest.raises(BdnError) as caught:
        await upstream.listed(uri)
    assert caught.value.code == code
    assert len(str(caught.value)) < 1000


# --- Whatever bytes come, a parser reads them or says which typed error they are: nothing else, and soon ---
ROOT = Path(__file__).parents[2]
FINDINGS = sorted((ROOT / "tests/fuzz/findings").glob("*-*"))
LONGEST_SECONDS = 60  # for one input; most take microseconds


class HangError(BaseException):
    """One input took too long."""


@contextmanager
def limited() -> Iterator[None]:
    def over(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(LONGEST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(target: Target, content: bytes) -> str | None:
    """What is wrong with what the target did, if anything."""
    try:
        with limited():
            target.run(content)
    except target.errors:
        return None
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]} for {content[:200]!r} ({len(content)} bytes)"
    return None


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_parser_reads_valid_forms_and_answers_the_rest_with_errors(name: str, tally: Tally) -> None:
    target = TARGETS[name]
    wrong: list[str] = []
    for content in all_of(target.seeds, at_scale(120, 1_500)):
        tally.add(scenarios=1)
        if (problem := outcome(target, content)) is not None:
            wrong.append(problem)
    tally.add(wrong=len(wrong))
    assert wrong[:3] == []


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_the_first_form_of_each_parser_is_read(name: str) -> None:
    TARGETS[name].run(TARGETS[name].seeds[0])


@pytest.mark.parametrize("piece", [":", "://", "s3://", "://:", "://@", "@", "/", "gs://a:"])
def test_a_source_of_two_million_signs_is_refused_soon(piece: str) -> None:
    """A mirror has one loop for everybody: a text whose signs are looked at once for each other one would stop it for hours."""
    assert outcome(TARGETS["source"], piece.encode() * (2_000_000 // len(piece))) is None


@pytest.mark.parametrize("finding", [pytest.param(path, id=path.name) for path in FINDINGS])
def test_what_was_found_once_is_borne_now(finding: Path) -> None:
    name = re.split(r"-(?:crash|timeout|oom|leak)-", finding.name)[0]
    assert outcome(TARGETS[name], finding.read_bytes()) is None


@pytest.mark.skipif(not FULL, reason="make fault searches; make test replays")
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_search_guided_by_coverage_finds_nothing(name: str, tally: Tally) -> None:
    command = [sys.executable, "-m", "tests.fuzz", name, "--seconds", "3"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    executed = re.search(r"stat::number_of_executed_units:\s*(\d+)", result.stderr)
    assert executed, result.stderr[-3000:]
    assert int(executed[1]) > 100
    tally.add(scenarios=int(executed[1]))
