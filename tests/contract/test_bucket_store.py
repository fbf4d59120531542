"""A store in a bucket: what its server may do to it. Real HTTP, a server that is told what to do."""

import errno
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import parse_qsl
from urllib.request import Request, urlopen

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.errors import InvalidRequestError, NotFoundError, StoreUnavailableError
from bdn.core.pace.retry import RetryPolicy
from bdn.core.source.uri import BucketUri, parse_source
from bdn.core.store import DELETE_SENT_SECONDS, LocatableStore, NotDeletedError
from bdn.mirror.db.chunks import DELETE_SECONDS, PUT_SECONDS
from bdn.sources.sign_in import Secret
from bdn.store.access import Pairs, open_access
from bdn.store.boot_clock import since_boot
from bdn.store.bucket import OPEN_AT_ONCE, Bucket
from bdn.store.bucket_store import BucketStore, open_bucket_store
from bdn.store.directory import KEPT
from tests.contract.opening import keys_of
from tests.doubles import faults
from tests.doubles.gcs import GcsServer
from tests.doubles.http_origin import Answer, Origin
from tests.doubles.http_origin import Request as OriginRequest
from tests.doubles.object_server import Objects, ObjectServer
from tests.doubles.sigv4 import Account
from tests.support.content.bucket_stores import bucket_at, gcs_context, s3_context, store_at
from tests.support.content.memory_store import content_of
from tests.support.content.names import named
from tests.support.crash.scripted_writes import failing

CONTENT = b"the bytes of a chunk"
CHUNK = digest_of(CONTENT)
TWICE = RetryPolicy(outage_seconds=0, attempts=2)
WEB_IDENTITY = (
    '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleWithWebIdentityResult>'
    "<Credentials>{}</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        yield server


@pytest.fixture
def server(shared_server: ObjectServer) -> ObjectServer:
    shared_server.log.clear()
    shared_server.script.clear()
    shared_server.clock = time.time
    return shared_server


@pytest.fixture
def objects(server: ObjectServer) -> Objects:
    return server.bucket("store")


@pytest.fixture
def store(server: ObjectServer, objects: Objects) -> Iterator[BucketStore]:
    with store_at("s3://store", s3_context(server), TWICE) as made:
        server.log.clear()
        yield made


def keys(objects: Objects, folder: str) -> list[str]:
    return [key for key in objects.held if key.startswith(f"{folder}/")]


# --- what its server may answer ---


@pytest.mark.parametrize("fault", [
    faults.answer(503), faults.answer(500), faults.answer(408), faults.drop(), faults.rate_limited(0),
    faults.answer(503, body=b"<Error><Code>SlowDown</Code></Error>"),
])  # fmt: skip
@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_a_failure_that_passes_is_outlived(
    store: BucketStore, server: ObjectServer, fault: faults.Fault, method: str
) -> None:
    server.script.add(fault, "/b3/", method=method)
    store.put(CHUNK, memoryview(CONTENT))
    assert content_of(store, CHUNK) == CONTENT


@pytest.mark.parametrize("at", [0, 5])
def test_an_object_that_comes_in_part_is_asked_for_again(store: BucketStore, server: ObjectServer, at: int) -> None:
    store.put(CHUNK, memoryview(CONTENT))
    server.script.add(faults.truncate(at), "/b3/", method="GET")
    assert content_of(store, CHUNK) == CONTENT


def test_a_store_that_is_closed_does_not_wait_to_ask_again(server: ObjectServer, objects: Objects) -> None:
    bucket, pauses = bucket_at("s3://store", s3_context(server)), list[float]()
    store = open_bucket_store(bucket)
    bucket.pause = pauses.append
    server.script.add(replace(faults.answer(500), before=store.close), times=None)
    with pytest.raises(StoreUnavailableError):
        store.open(CHUNK)
    assert pauses == []


def test_a_server_that_goes_on_failing_is_an_unavailable_store(store: BucketStore, server: ObjectServer) -> None:
    server.fail(faults.answer(503), times=None)
    for act in (
        lambda: store.put(CHUNK, memoryview(CONTENT)),
        lambda: store.open(CHUNK),
        lambda: store.delete([CHUNK]),
        lambda: list(store.listed()),
        store.check,
        store.evidence,
    ):
        with pytest.raises(StoreUnavailableError, match="s3://store is not available: it answered 503"):
            act()


@pytest.mark.parametrize(("status", "code", "expected"), [
    (403, "AccessDenied", "BDN_STORE_SECRET.*docs/operations.md"),
    (403, "InvalidAccessKeyId", "the access key does not exist.*BDN_STORE_SECRET"),
    (403, "SignatureDoesNotMatch", "the secret access key is wrong.*BDN_STORE_SECRET"),
    (400, "ExpiredToken", "the session token has expired.*BDN_STORE_SECRET"),
    (403, "RequestTimeTooSkewed", "the clock of this machine is wrong"),
    (401, "", "BDN_STORE_SECRET"),
    (404, "NoSuchBucket", "create the bucket, or correct BDN_STORE"),
    (301, "PermanentRedirect", "set BDN_STORE_REGION=eu-west-1"),
    (400, "Whatever", "400 Whatever"),
])  # fmt: skip
def test_a_refusal_says_which_setting_and_is_not_asked_again(
    store: BucketStore, server: ObjectServer, status: int, code: str, expected: str
) -> None:
    told = {"x-amz-bucket-region": "eu-west-1"}
    server.fail(faults.answer(status, told, f"<Error><Code>{code}</Code></Error>".encode()), times=None)
    with pytest.raises(StoreUnavailableError, match=expected) as caught:
        store.open(CHUNK)
    assert server.log.count() == 1
    assert "X-Amz" not in str(caught.value)
    assert server.account.secret_access_key not in str(caught.value)


def test_while_the_server_asks_to_wait_nobody_asks_it(store: BucketStore, server: ObjectServer) -> None:
    server.script.add(faults.rate_limited(60))
    for act in (lambda: store.open(CHUNK), store.check):
        with pytest.raises(StoreUnavailableError, match="says to wait"):
            act()
    assert server.log.count() == 1


def test_a_bucket_that_hangs_fails_within_two_timeouts_and_is_checked_once(
    server: ObjectServer, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def pass_time() -> None:
        nonlocal now
        now += 30

    with store_at("s3://store", s3_context(server)) as store:
        server.log.clear()
        now = time.monotonic()
        server.script.add(replace(faults.answer(500), before=pass_time), times=None)
        monkeypatch.setattr("bdn.store.bucket.time.monotonic", lambda: now)
        for act, times in ((lambda: store.open(CHUNK), 2), (store.check, 1)):
            with pytest.raises(StoreUnavailableError):
                act()
            assert server.log.count() == times
            server.log.clear()


@pytest.mark.parametrize("fault", [faults.rate_limited(3600), faults.answer(503, {"Retry-After": "3600"})])
def test_one_answer_does_not_close_the_store_for_an_hour(
    store: BucketStore, server: ObjectServer, monkeypatch: pytest.MonkeyPatch, fault: faults.Fault
) -> None:
    server.script.add(fault)
    with pytest.raises(StoreUnavailableError):
        store.check()
    now = time.monotonic() + 31
    monkeypatch.setattr("bdn.store.bucket.time.monotonic", lambda: now)
    store.check()


def test_a_bucket_that_is_gone_is_not_taken_for_one_without_the_chunk(store: BucketStore, server: ObjectServer) -> None:
    """An answer to HEAD does not say which."""
    store.put(CHUNK, memoryview(CONTENT))
    server.buckets.clear()
    acts: tuple[Callable[[], object], ...] = (
        lambda: store.delete([CHUNK]),
        lambda: store.fault(CHUNK),
        store.owner,
        store.check,
    )
    for act in acts:
        with pytest.raises(StoreUnavailableError, match="NoSuchBucket"):
            act()


def test_all_of_a_bucket_is_listed_whatever_fits_on_a_page(store: BucketStore, objects: Objects) -> None:
    objects.page_limit = 3
    digests = {named(f"{number}") for number in range(10)}
    for number in range(10):
        store.put(named(f"{number}"), memoryview(b"%d" % number))
    objects.overwrite("b3/aa/bb/no-chunk", b"x")
    objects.overwrite(f"b3/{CHUNK.hex}", b"at another place")
    assert {chunk.digest for chunk in store.listed()} == digests


def test_a_longer_object_is_not_read_to_its_end(store: BucketStore, objects: Objects) -> None:
    objects.overwrite(f"b3/{CHUNK.fanout}", bytes(CHUNK_SIZE * 3))
    assert store.fault(CHUNK) == "it is larger than a chunk can be"


def test_who_gives_chunks_away_never_waits_for_room_and_the_store_has_its_own(
    store: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only they make room: all that wait would wait for each other."""
    store.put(CHUNK, memoryview(CONTENT))
    files = [store.open(CHUNK, reader="a") for _ in range(OPEN_AT_ONCE // 2)]
    monkeypatch.setattr("bdn.store.bucket._OWN_SECONDS", 600.0)  # whoever waits runs into the end of the test's time
    with pytest.raises(StoreUnavailableError, match="try again"):
        store.open(CHUNK, reader="a")
    store.open(CHUNK, reader="b").close()  # another organisation has its own share
    assert store.fault(CHUNK) is None
    for file in files:
        file.close()
        file.close()
    for _ in range(OPEN_AT_ONCE):
        with pytest.raises(NotFoundError):
            store.open(named("absent"), reader="a")
    store.open(CHUNK, reader="a").close()


def test_the_store_itself_waits_for_room(store: BucketStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bdn.store.bucket._OWN_SECONDS", 0.01)
    store.put(CHUNK, memoryview(CONTENT))
    files = [store.open(CHUNK) for _ in range(8)]
    with pytest.raises(StoreUnavailableError, match="8 chunks of s3://store are being read; try again"):
        store.open(CHUNK)
    for file in files:
        file.close()
    assert content_of(store, CHUNK) == CONTENT


# --- what a server can do ---


@pytest.mark.parametrize(("checks", "said"), [
    ({"crc32c", "md5"}, ""),
    ({"md5"}, "using MD5 instead"),  # radosgw
    (set(), "nor MD5"),
])  # fmt: skip
def test_a_server_is_tried_once_and_what_it_lacks_is_said_in_one_line(
    server: ObjectServer, objects: Objects, caplog: pytest.LogCaptureFixture, checks: set[str], said: str
) -> None:
    objects.checks = frozenset(checks)
    with caplog.at_level(logging.WARNING), store_at("s3://store", s3_context(server)) as store:
        store.put(CHUNK, memoryview(CONTENT))
        assert content_of(store, CHUNK) == CONTENT
    assert [said in record.getMessage() for record in caplog.records] == ([True] if said else [])
    assert keys(objects, "probe") == []


@pytest.mark.parametrize("checks", [{"crc32c", "md5"}, {"md5"}, set()])
def test_bytes_that_change_on_their_way_are_never_acknowledged(
    server: ObjectServer, objects: Objects, checks: set[str]
) -> None:
    objects.checks = frozenset(checks)
    with store_at("s3://store", s3_context(server), TWICE) as store:
        objects.spoils = True
        with pytest.raises(StoreUnavailableError):
            store.put(CHUNK, memoryview(CONTENT))


# --- wrong content ---


def test_a_wrong_object_is_found_kept_for_people_and_replaced_by_who_puts_the_right_one(
    store: BucketStore, objects: Objects
) -> None:
    store.put(CHUNK, memoryview(CONTENT))
    assert store.fault(CHUNK) is None
    assert not store.set_aside(CHUNK)
    wrong = CONTENT[::-1]
    objects.overwrite(f"b3/{CHUNK.fanout}", wrong)
    assert store.fault(CHUNK) == f"its {len(wrong)} bytes have the digest {digest_of(wrong)}"

    assert store.set_aside(CHUNK)
    assert [objects.held[key].content for key in keys(objects, "quarantine")] == [wrong]
    assert store.evidence() == 1

    store.put(CHUNK, memoryview(CONTENT))
    assert content_of(store, CHUNK) == CONTENT
    store.delete([CHUNK])
    assert store.fault(CHUNK) == "it is absent"
    assert not store.set_aside(CHUNK)


@pytest.mark.parametrize("fault", [faults.answer(500), faults.answer(403), faults.truncate(5)])
def test_an_object_that_alone_cannot_be_read_is_wrong(
    store: BucketStore, server: ObjectServer, objects: Objects, fault: faults.Fault
) -> None:
    """A round of reading goes on behind it."""
    store.put(CHUNK, memoryview(CONTENT))
    server.script.add(fault, "/b3/", method="GET", times=2)
    assert str(store.fault(CHUNK)).startswith("it cannot be read (")
    assert keys(objects, "probe") == []


@pytest.mark.parametrize("fault", [faults.answer(500), faults.answer(403), faults.answer(503), faults.drop()])
def test_an_object_that_cannot_be_read_while_others_cannot_either_is_not_wrong(
    store: BucketStore, server: ObjectServer, fault: faults.Fault
) -> None:
    store.put(CHUNK, memoryview(CONTENT))
    server.script.add(fault, method="GET", times=None)
    with pytest.raises(StoreUnavailableError):
        store.fault(CHUNK)


def test_right_bytes_that_come_over_a_link_which_breaks_large_bodies_are_not_wrong(
    store: BucketStore, server: ObjectServer, objects: Objects
) -> None:
    content = bytes(100_000)
    store.put(digest_of(content), memoryview(content))
    server.script.add(faults.truncate(60_000), method="GET", times=None)  # small ones arrive
    with pytest.raises(StoreUnavailableError):
        store.set_aside(digest_of(content))
    server.script.clear()
    assert content_of(store, digest_of(content)) == content
    assert keys(objects, "quarantine") == []


def test_the_oldest_evidence_goes(store: BucketStore, objects: Objects) -> None:
    for number in range(KEPT + 1):
        objects.overwrite(f"quarantine/{number:020}-{CHUNK.hex}", b"wrong")
    objects.overwrite(f"b3/{CHUNK.fanout}", b"wrong")
    assert store.set_aside(CHUNK)
    assert store.evidence() == KEPT
    assert not any(key.startswith("quarantine/0" + "0" * 18 + "0-") for key in objects.held)


# --- what is deleted ---


@pytest.mark.promise("collection")
@pytest.mark.parametrize("fault", [faults.drop(), faults.answer(500), faults.answer(503), faults.answer(403)])
def test_delete__no_answer_or_a_failure__is_sent_once_and_names_the_chunk(
    store: BucketStore, server: ObjectServer, fault: faults.Fault
) -> None:
    """The first DELETE may be carried out when a second one was answered, and the chunk was put anew."""
    other = digest_of(b"another")
    for content in (CONTENT, b"another"):
        store.put(digest_of(content), memoryview(content))
    server.script.add(fault, CHUNK.hex, method="DELETE")
    with pytest.raises(NotDeletedError) as caught:
        store.delete([CHUNK, other])
    assert caught.value.left == {CHUNK}
    assert server.log.count(CHUNK.hex, method="DELETE") == 1
    assert {one.digest for one in store.listed()} == {CHUNK}

    store.delete([CHUNK, other])
    assert not [*store.listed()]


def test_delete__server_asks_to_wait__is_sent_again(store: BucketStore, server: ObjectServer) -> None:
    """It says that it has done nothing."""
    store.put(CHUNK, memoryview(CONTENT))
    server.script.add(faults.rate_limited(0), "/b3/", method="DELETE")
    store.delete([CHUNK])
    assert not [*store.listed()]


@pytest.mark.promise("collection")
def test_delete__server_has_closed_idle_connections__uses_none_of_them(
    store: BucketStore, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DELETE that meets the end of its connection has no answer."""
    store.put(CHUNK, memoryview(CONTENT))
    monkeypatch.setattr(store._bucket._connections, "request", failing(errno.ECONNRESET))
    store.delete([CHUNK])
    assert server.log.count("/b3/", method="DELETE") == 1


@pytest.mark.promise("collection")
def test_delete__signing_takes_long__is_not_sent(
    store: BucketStore, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its signature would be good for longer than its chunk's row stays."""
    store.put(CHUNK, memoryview(CONTENT))
    now = since_boot()
    for place in ("bucket", "bucket_store"):
        monkeypatch.setattr(f"bdn.store.{place}.since_boot", lambda: now)
    address = store._bucket.access.address

    def sign(method: str, key: str, query: Mapping[str, str], headers: Pairs) -> str:
        nonlocal now
        now += (DELETE_SENT_SECONDS + 1) * (method == "DELETE")
        return address(method, key, query, headers)

    monkeypatch.setattr(store._bucket.access, "address", sign)
    with pytest.raises(NotDeletedError, match="waited too long"):
        store.delete([CHUNK])
    assert server.log.count(method="DELETE") == 0


@pytest.mark.promise("collection")
def test_what_changes_an_object_is_signed_for_minutes_and_refused_later(
    store: BucketStore, server: ObjectServer
) -> None:
    store.put(CHUNK, memoryview(CONTENT))
    store.delete([CHUNK])
    for method, mirror_seconds in (("PUT", PUT_SECONDS), ("DELETE", DELETE_SECONDS)):
        assert server.log.count("X-Amz-Expires=300&", method=method) == 1
        assert mirror_seconds - 300 > DELETE_SENT_SECONDS + 300, "clocks differ"


def test_leftovers_of_trying_the_server_are_dropped_when_they_are_old(
    store: BucketStore, server: ObjectServer, objects: Objects
) -> None:
    now = 1_800_000_000.0
    server.clock = lambda: now
    objects.overwrite("probe/x", b"123")
    assert store.drop_leftovers(now, dry_run=False) == (0, 0)
    assert store.drop_leftovers(now + 1, dry_run=True) == (1, 3)
    assert store.drop_leftovers(now + 1, dry_run=False) == (1, 3)
    assert objects.held == {}


def test_owner__server_knows_no_condition__is_written_all_the_same(store: BucketStore, server: ObjectServer) -> None:
    server.script.add(faults.answer(501), "owner", method="PUT")
    assert store.owner("first") == "first"


# --- others that read ---


def test_a_location_opens_one_chunk_and_nothing_else(store: BucketStore, server: ObjectServer) -> None:
    assert isinstance(store, LocatableStore)
    store.put(CHUNK, memoryview(CONTENT))
    location, absent = store.locate([CHUNK, named("absent")])
    with urlopen(Request(location.url, headers={**dict(location.headers), "Range": "bytes=4-8"})) as answer:
        assert (answer.status, answer.read()) == (206, CONTENT[4:9])
    assert location.expires_at is not None
    assert 0 < location.expires_at - time.time() <= 900
    elsewhere = location.url.replace(CHUNK.hex, named("absent").hex)
    for url, status in ((absent.url, 404), (elsewhere, 403), (location.url.partition("?")[0], 403)):
        with pytest.raises(HTTPError) as caught:
            urlopen(url)
        assert caught.value.code == status
        caught.value.close()


def test_a_location_of_google_opens_one_chunk_and_nothing_else() -> None:
    with GcsServer() as gcs:
        gcs.written_bucket("store")
        with store_at("gs://store", gcs_context(gcs)) as store:
            store.put(CHUNK, memoryview(CONTENT))
            location, absent = store.locate([CHUNK, named("absent")])
            with urlopen(Request(location.url, headers={"Range": "bytes=4-8"})) as answer:
                assert answer.read() == CONTENT[4:9]
            for url, status in ((absent.url, 404), (location.url.replace(CHUNK.hex, named("absent").hex), 403)):
                with pytest.raises(HTTPError) as caught:
                    urlopen(url)
                assert caught.value.code == status
                caught.value.close()


def test_a_secret_that_is_changed_is_used_before_long(server: ObjectServer, objects: Objects) -> None:
    now, context = time.time(), s3_context(server)
    server.clock = lambda: now
    account = Account("AKIANEW", "new")

    async def reread() -> Secret:
        return Secret("store", keys_of(server.account))

    uri = parse_source("s3://store")
    assert isinstance(uri, BucketUri)
    with closing(Bucket(uri, open_access(uri, replace(context, clock=lambda: now), reread), TWICE)) as bucket:
        store = open_bucket_store(bucket)
        old, server.account = server.account, account
        try:
            with pytest.raises(StoreUnavailableError, match="BDN_STORE_SECRET"):
                store.check()
            now += 901
            store.check()
        finally:
            server.account = old


@pytest.mark.parametrize("how", ["the container's", "a web identity"])
def test_a_machines_role_opens_the_store_and_is_taken_again_before_it_ends(
    server: ObjectServer, objects: Objects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    now, taken = time.time(), list[str]()
    server.clock = lambda: now

    def give(request: OriginRequest) -> Answer:
        taken.append(request.headers.get("authorization") or dict(parse_qsl(request.body.decode()))["WebIdentityToken"])
        server.account = Account(f"ASIA{len(taken)}", "secret", f"token {len(taken)}")
        keys = {
            "AccessKeyId": server.account.access_key_id,
            "SecretAccessKey": "secret",
            ("Token" if how == "the container's" else "SessionToken"): server.account.session_token,
            "Expiration": datetime.fromtimestamp(now + 3600, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        if how == "the container's":
            return Answer(200, {"Content-Type": "application/json"}, json.dumps(keys).encode())
        members = "".join(f"<{name}>{value}</{name}>" for name, value in keys.items())
        return Answer(200, {"Content-Type": "text/xml"}, WEB_IDENTITY.format(members).encode())

    old = server.account
    try:
        with Origin("metadata", give) as metadata:
            (tmp_path / "token").write_text("the token of a pod")
            for name, value in {
                "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{metadata.url}/keys",
                "AWS_CONTAINER_AUTHORIZATION_TOKEN": "the token of a pod",
            }.items() if how == "the container's" else {
                "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/store",
                "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
                "AWS_ENDPOINT_URL_STS": metadata.url,
            }.items():  # fmt: skip
                monkeypatch.setenv(name, value)
            context = replace(s3_context(server), sign_in=None, ambient_credentials=True, clock=lambda: now)
            with store_at("s3://store", context, TWICE) as store:
                store.put(CHUNK, memoryview(CONTENT))
                (location,) = store.locate([CHUNK])
                assert location.expires_at == pytest.approx(now + 900, abs=2)
                now += 3300 + 1
                assert content_of(store, CHUNK) == CONTENT
        assert taken == ["the token of a pod"] * 2
    finally:
        server.account = old


@pytest.mark.parametrize(("address", "said"), [
    ("s3://store", "BDN_STORE_SECRET, set AWS_ACCESS_KEY_ID.*role of AWS"),
    ("r2://4cc0.store", "BDN_STORE_SECRET"),
])  # fmt: skip
def test_a_store_without_credentials_says_how_to_name_them(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, address: str, said: str
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    context = replace(s3_context(server), sign_in=None, ambient_credentials=True)
    with pytest.raises(InvalidRequestError, match=said), store_at(address, context):
        pass


def test_get__sandbox_refuses_files_in_memory__the_chunk_is_served_all_the_same(
    store: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(CHUNK, memoryview(CONTENT))
    monkeypatch.setattr(os, "memfd_create", failing(errno.EACCES))

    assert content_of(store, CHUNK) == CONTENT
