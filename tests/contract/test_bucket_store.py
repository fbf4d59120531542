"""A store in a bucket: what its server may do to it, and who collects beside who counts on a chunk. Real HTTP, a server that is told what to do."""

import errno
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qsl
from urllib.request import Request, urlopen

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.errors import InvalidRequestError, NotFoundError, StoreUnavailableError
from bdn.core.pace.retry import RetryPolicy
from bdn.core.source.uri import BucketUri, parse_source
from bdn.core.store import LocatableStore, StoredChunk
from bdn.sources.sign_in import Secret
from bdn.store.access import Pairs, open_access
from bdn.store.bucket import OPEN_AT_ONCE, Bucket, utc_seconds
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
from tests.support.services.commands import wait_until

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


@pytest.fixture
def other(server: ObjectServer, store: BucketStore) -> Iterator[BucketStore]:
    """The same, as another process has it."""
    with store_at("s3://store", s3_context(server), TWICE) as made:
        server.log.clear()
        yield made


def keys(objects: Objects, folder: str) -> list[str]:
    return [key for key in objects.held if key.startswith(f"{folder}/")]


def seen(store: BucketStore) -> list[StoredChunk]:
    return list(store.stored([CHUNK]))


# --- what its server may answer ---


@pytest.mark.parametrize("fault", [
    faults.answer(503), faults.answer(500), faults.answer(408), faults.drop(), faults.rate_limited(0),
    faults.answer(503, body=b"<Error><Code>SlowDown</Code></Error>"),
])  # fmt: skip
@pytest.mark.parametrize("method", ["PUT", "HEAD", "GET"])
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


@pytest.mark.promise("collection")
@pytest.mark.parametrize("at", [0, 10, 60])
def test_a_copy_whose_answer_breaks_off_is_not_believed(
    store: BucketStore, server: ObjectServer, objects: Objects, at: int
) -> None:
    """S3 says 200 before it copies."""
    store.put(CHUNK, memoryview(CONTENT))
    before = objects.held[f"b3/{CHUNK.fanout}"].metadata
    body = b"<CopyObjectResult><ETag>&quot;0123456789abcdef&quot;</ETag></CopyObjectResult>"
    server.script.add(faults.answer(200, body=body[:at]), "/b3/", method="PUT")
    assert store.keep([CHUNK]) == {CHUNK}
    assert objects.held[f"b3/{CHUNK.fanout}"].metadata != before, "it was asked again"


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
        lambda: store.keep([CHUNK]),
        lambda: seen(store),
        lambda: list(store.stored()),
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
    (404, "NoSuchBucket", "make the bucket, or correct BDN_STORE"),
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
        with pytest.raises(StoreUnavailableError, match="asks to wait"):
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
    for act in (lambda: seen(store), lambda: store.keep([CHUNK]), lambda: store.fault(CHUNK), store.check):
        with pytest.raises(StoreUnavailableError, match="NoSuchBucket"):
            act()


def test_all_of_a_bucket_is_listed_whatever_fits_on_a_page(store: BucketStore, objects: Objects) -> None:
    objects.page_limit = 3
    digests = {named(f"{number}") for number in range(10)}
    for number in range(10):
        store.put(named(f"{number}"), memoryview(b"%d" % number))
    objects.overwrite("b3/aa/bb/no-chunk", b"x")
    objects.overwrite(f"b3/{CHUNK.hex}", b"at another place")
    assert {chunk.digest for chunk in store.stored()} == digests


def test_a_longer_object_is_not_read_to_its_end(store: BucketStore, objects: Objects) -> None:
    objects.overwrite(f"b3/{CHUNK.fanout}", bytes(CHUNK_SIZE * 3))
    assert store.fault(CHUNK) == "it is longer than a chunk can be"


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


@pytest.mark.parametrize(("checks", "leaves", "said"), [
    ({"crc32c", "md5"}, True, ""),
    ({"md5"}, True, "it compares MD5 alone"),  # radosgw
    (set(), True, "it compares no checksum"),
    ({"crc32c", "md5"}, False, "it overwrites what is there"),
])  # fmt: skip
def test_a_server_is_tried_once_and_what_it_lacks_is_said_in_one_line(
    server: ObjectServer,
    objects: Objects,
    caplog: pytest.LogCaptureFixture,
    checks: set[str],
    leaves: bool,
    said: str,
) -> None:
    objects.checks, objects.leaves_what_is_there = frozenset(checks), leaves
    with caplog.at_level(logging.WARNING), store_at("s3://store", s3_context(server)) as store:
        store.put(CHUNK, memoryview(CONTENT))
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


def test_a_chunk_that_is_collected_before_it_was_read_again_is_written_again(
    server: ObjectServer, objects: Objects
) -> None:
    objects.checks = frozenset()
    with store_at("s3://store", s3_context(server), TWICE) as store:
        gone = replace(faults.answer(404), before=lambda: objects.held.pop(f"b3/{CHUNK.fanout}"))
        server.script.add(gone, "/b3/", method="GET")
        store.put(CHUNK, memoryview(CONTENT))
        assert content_of(store, CHUNK) == CONTENT


def test_a_server_that_does_not_list_what_was_just_written_is_not_used(server: ObjectServer, objects: Objects) -> None:
    empty = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    server.fail(faults.answer(200, body=empty), "list-type", times=None)
    with (
        pytest.raises(StoreUnavailableError, match="does not list at once"),
        store_at("s3://store", s3_context(server)),
    ):
        pass


@pytest.mark.parametrize(
    ("ahead", "said"), [(3600, "clock of this machine is -3[56][0-9][0-9] s off"), (-600, "is [+]60[0-9] s off")]
)
def test_a_server_whose_clock_is_not_ours_is_not_used(
    server: ObjectServer, objects: Objects, ahead: float, said: str
) -> None:
    server.clock = lambda: time.time() + ahead
    with pytest.raises(StoreUnavailableError, match=said), store_at("s3://store", s3_context(server)):
        pass


def test_a_server_whose_clocks_differ_is_not_used(server: ObjectServer, objects: Objects) -> None:
    """It would call a marker old that was just written."""
    objects._clock = lambda: time.time() - 3600
    with pytest.raises(StoreUnavailableError, match="clocks differ"), store_at("s3://store", s3_context(server)):
        pass


@pytest.mark.parametrize("text", ["2027-01-15T08:00:00", "2027-01-15T08:00:00.000Z"])
def test_a_time_without_a_zone_is_utc(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert utc_seconds(datetime.fromisoformat(text)) == 1_800_000_000
    finally:
        monkeypatch.undo()
        time.tzset()


# --- wrong content ---


def test_a_wrong_object_is_found_kept_for_people_and_replaced_by_who_puts_the_right_one(
    store: BucketStore, objects: Objects
) -> None:
    store.put(CHUNK, memoryview(CONTENT))
    assert store.fault(CHUNK) is None
    assert not store.set_aside(CHUNK)
    wrong = CONTENT[::-1]
    objects.overwrite(f"b3/{CHUNK.fanout}", wrong)
    assert store.fault(CHUNK) == f"its {len(wrong)} bytes are {digest_of(wrong)}"

    assert store.set_aside(CHUNK)
    assert not store.set_aside(CHUNK)
    assert store.fault(CHUNK) == "it is absent"
    assert [objects.held[key].content for key in keys(objects, "quarantine")] == [wrong]
    assert store.evidence() == 1

    objects.overwrite(f"b3/{CHUNK.fanout}", wrong)
    store.put(CHUNK, memoryview(CONTENT))
    assert content_of(store, CHUNK) == CONTENT


@pytest.mark.parametrize("fault", [faults.answer(500), faults.answer(403), faults.truncate(5)])
def test_an_object_that_alone_cannot_be_read_or_touched_is_wrong_and_replaced(
    store: BucketStore, server: ObjectServer, objects: Objects, fault: faults.Fault
) -> None:
    """A round of reading goes on behind it."""
    store.put(CHUNK, memoryview(CONTENT))
    before = objects.held[f"b3/{CHUNK.fanout}"].written_at
    server.script.add(fault, "/b3/", method="GET", times=2)
    assert str(store.fault(CHUNK)).startswith("it cannot be read (")
    assert keys(objects, "probe") == []

    server.clock = lambda: before + 100
    server.script.clear()
    server.script.add(faults.answer(500), "/b3/", method="HEAD", times=2)
    store.put(CHUNK, memoryview(CONTENT))
    assert objects.held[f"b3/{CHUNK.fanout}"].written_at == before + 100
    server.script.add(faults.answer(500), "/b3/", method="PUT", times=2)
    assert store.keep([CHUNK]) == set(), "who needs it puts it again"


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


def test_who_finds_a_marker_gone_looks_for_another_one(
    store: BucketStore, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector whose DELETE is not answered names the chunk in a new marker, and takes the one back that stands in a listing."""
    store.put(CHUNK, memoryview(CONTENT))
    objects.overwrite("leaving/first", CHUNK.hex.encode())
    bucket = store._bucket
    get, waited = bucket.get, []

    def get_late(key: str) -> Any:
        if key.endswith("leaving/first"):
            bucket.delete(key)
            objects.overwrite("leaving/second", CHUNK.hex.encode())
        return get(key)

    def pause(_: float) -> None:
        waited.append(keys(objects, "leaving"))
        if len(waited) > 1:
            bucket.delete(f"{store._leaving}second")
            bucket.delete(f"{store._chunks}{CHUNK.fanout}")

    monkeypatch.setattr(bucket, "get", get_late)
    monkeypatch.setattr(bucket, "pause", pause)
    assert store.keep([CHUNK]) == set()
    assert len(waited) == 2


def test_right_bytes_that_come_while_a_wrong_object_is_put_aside_stay(
    store: BucketStore, other: BucketStore, server: ObjectServer, objects: Objects
) -> None:
    objects.overwrite(f"b3/{CHUNK.fanout}", b"wrong")
    server.script.add(faults.right_after(lambda: other.put(CHUNK, memoryview(CONTENT))), "/quarantine/", method="PUT")
    assert not store.set_aside(CHUNK)
    assert content_of(store, CHUNK) == CONTENT
    assert store.evidence() == 0


def test_the_oldest_evidence_goes(store: BucketStore, objects: Objects) -> None:
    for number in range(KEPT + 1):
        objects.overwrite(f"quarantine/{number:020}-{CHUNK.hex}", b"wrong")
    objects.overwrite(f"b3/{CHUNK.fanout}", b"wrong")
    assert store.set_aside(CHUNK)
    assert store.evidence() == KEPT
    assert not any(key.startswith("quarantine/0" + "0" * 18 + "0-") for key in objects.held)


# --- who collects, beside who counts on a chunk ---


@pytest.mark.promise("collection")
@pytest.mark.parametrize("again", ["put", "kept"])
@pytest.mark.parametrize("look", ["asked for", "listed"])
def test_a_touch_within_the_second_of_the_look_is_not_missed(
    store: BucketStore, server: ObjectServer, again: str, look: str
) -> None:
    """Servers tell times in whole seconds."""
    server.clock = lambda: 1_800_000_000.0
    store.put(CHUNK, memoryview(CONTENT))
    found = seen(store) if look == "asked for" else list(store.stored())
    if again == "put":
        store.put(CHUNK, memoryview(CONTENT))
    else:
        assert store.keep([CHUNK])
    assert store.collect(found) == []
    assert content_of(store, CHUNK) == CONTENT


def test_what_is_older_is_listed_without_being_asked_for_and_a_touch_is_seen(
    store: BucketStore, server: ObjectServer
) -> None:
    now = 1_800_000_000.0
    server.clock = lambda: now
    store.put(CHUNK, memoryview(CONTENT))
    now += 60
    server.log.clear()
    (found,) = store.stored()
    assert server.log.count(method="HEAD") == 0
    assert found.kept_at == 1_800_000_000
    assert store.keep([CHUNK])
    assert store.collect([found]) == []
    now += 60
    assert store.collect(list(store.stored()))


@pytest.mark.promise("collection")
@pytest.mark.parametrize("step", ["PUT", "HEAD", "DELETE"])
@pytest.mark.parametrize("again", ["put", "kept"])
def test_whoever_counts_on_a_chunk_at_whatever_step_of_its_collection_has_it(
    store: BucketStore, other: BucketStore, server: ObjectServer, again: str, step: str
) -> None:
    """The collector stands just before it writes its marker, looks at the chunk, or deletes it, until the other one waits or is through."""
    store.put(CHUNK, memoryview(CONTENT))
    found = seen(store)
    kept: list[bool] = []

    def count_on_it() -> None:
        if again == "put" or not other.keep([CHUNK]):
            other.put(CHUNK, memoryview(CONTENT))
        kept.append(content_of(other, CHUNK) == CONTENT)

    with ThreadPoolExecutor(1) as threads:

        def begin() -> None:
            server.log.clear()
            began.append(threads.submit(count_on_it))
            wait_until(lambda: began[0].done() or server.log.count("leaving", method="GET") > 3)

        began: list[Future[None]] = []
        place = "/leaving/" if step == "PUT" else "/b3/"
        server.script.add(faults.right_after(begin), place, method=step)
        store.collect(found)
        began[0].result()
    assert kept == [True]
    assert content_of(store, CHUNK) == CONTENT


@pytest.mark.promise("collection")
def test_a_delete_without_an_answer_is_waited_for(
    store: BucketStore, other: BucketStore, server: ObjectServer, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be carried out later. Nobody counts on the chunk before that is ruled out by the server's own clock."""
    now = 1_800_000_000.0
    server.clock = lambda: now
    store.put(CHUNK, memoryview(CONTENT))
    with_it = digest_of(b"another")
    store.put(with_it, memoryview(b"another"))
    server.script.add(faults.drop(), CHUNK.hex, method="DELETE")
    assert [chunk.digest for chunk in store.collect(list(store.stored([CHUNK, with_it])))] == [with_it]
    assert server.log.count(CHUNK.hex, method="DELETE") == 1
    monkeypatch.setattr("bdn.store.bucket_store._WAIT_SECONDS", 0.05)
    for act in (lambda: other.keep([CHUNK]), lambda: other.put(CHUNK, memoryview(CONTENT))):
        with pytest.raises(StoreUnavailableError, match="try again in a quarter of an hour"):
            act()
    other.put(with_it, memoryview(b"another"))  # concerns nobody else, be it of the same batch

    del objects.held[f"b3/{CHUNK.fanout}"]  # now it is carried out
    now += 901
    other.put(CHUNK, memoryview(CONTENT))
    assert content_of(store, CHUNK) == CONTENT
    assert keys(objects, "leaving") == []


@pytest.mark.promise("collection")
def test_a_chunk_that_is_gone_before_its_delete_is_answered_is_collected_and_still_marked(
    store: BucketStore, other: BucketStore, server: ObjectServer, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another collector may have removed it, and the DELETE without an answer may reach what is put anew."""
    store.put(CHUNK, memoryview(CONTENT))
    found = seen(store)
    carried_out = replace(faults.answer(500), before=lambda: objects.held.pop(f"b3/{CHUNK.fanout}"))
    server.script.add(carried_out, "/b3/", method="DELETE")
    assert store.collect(found) == found
    monkeypatch.setattr("bdn.store.bucket_store._WAIT_SECONDS", 0.05)
    with pytest.raises(StoreUnavailableError, match="try again in a quarter of an hour"):
        other.put(CHUNK, memoryview(CONTENT))


@pytest.mark.promise("collection")
def test_a_collector_that_was_held_up_deletes_nothing_any_more(
    store: BucketStore, server: ObjectServer, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then others may not believe its marker. Signing may take a minute, too."""
    store.put(CHUNK, memoryview(CONTENT))
    found, now = seen(store), 0.0

    monkeypatch.setattr("bdn.store.bucket_store.since_boot", lambda: now)
    monkeypatch.setattr("bdn.store.bucket.since_boot", lambda: now)
    address = store._bucket.access.address

    def sign(method: str, key: str, query: Mapping[str, str], headers: Pairs) -> str:
        nonlocal now
        now += 61.0 * (method == "DELETE")
        return address(method, key, query, headers)

    monkeypatch.setattr(store._bucket.access, "address", sign)
    assert store.collect(found) == []
    assert server.log.count("/b3/", method="DELETE") == 0
    assert content_of(store, CHUNK) == CONTENT


def test_a_delete_is_signed_for_two_minutes_so_the_server_refuses_a_late_one(
    store: BucketStore, server: ObjectServer
) -> None:
    store.put(CHUNK, memoryview(CONTENT))
    assert store.collect(seen(store))
    assert server.log.count("X-Amz-Expires=120&", method="DELETE") == 2  # the chunk and the marker


def test_markers_and_trials_that_were_left_are_dropped_when_they_are_old(
    store: BucketStore, server: ObjectServer, objects: Objects
) -> None:
    now = 1_800_000_000.0
    server.clock = lambda: now
    objects.overwrite("leaving/x", b"123")
    objects.overwrite("probe/x", b"1")
    assert store.drop_leftovers(now + 1, dry_run=False) == (0, 0), "somebody may be at it"
    now += 901
    assert store.drop_leftovers(now, dry_run=True) == (2, 4)
    assert store.drop_leftovers(now, dry_run=False) == (2, 4)
    assert objects.held == {}


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
