"""Addresses of chunks in the mirror's bucket are asked for ahead, by one thread for all, and anew before they end."""

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain

import pytest
from pydantic import ValidationError

from bdn.core.chunk import Digest
from bdn.core.errors import NotFoundError, StoreUnavailableError
from bdn.wire.location_schema import ChunkLocation, Locations
from bdn.wire.shapes import document_of, error_from
from node_agent.fetch.locations import LocationLookup, Reading
from tests.fakes.clock import Clock
from tests.support.content.names import named

MANIFEST, CHUNKS = named("manifest"), [named(f"chunk {number}") for number in range(1200)]
NEVER = threading.Event()


@dataclass
class Mirror:
    """Answers with the number of the question as the address. ``unknown`` belongs to no manifest of the grant."""

    seconds: float = 600
    unknown: Digest | None = None
    refused: Digest | None = None
    place: str = ""  # before the number
    asked: list[list[Digest]] = field(default_factory=list)
    bearers: list[str] = field(default_factory=list)
    gate: threading.Event | None = None
    entered: threading.Event = field(default_factory=threading.Event)

    def __call__(self, manifest: Digest, digests: Sequence[Digest], bearer: str, _: threading.Event) -> Locations:
        assert manifest == MANIFEST
        self.bearers.append(bearer)
        self.asked.append(list(digests))
        number = len(self.asked)
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(60)
        if self.unknown in digests:
            error = NotFoundError(f"chunk {self.unknown}")
            raise error_from(404, json.dumps(document_of(error)).encode())  # as it comes from a mirror
        return Locations(
            delivery="direct",
            items=[
                ChunkLocation(
                    digest=str(digest), url=f"{self.place}{number}", headers={}, expires_in_seconds=self.seconds
                )
                for digest in digests
                if digest != self.refused
            ],
        )


def url_of(locations: LocationLookup, reading: Reading, chunk: Digest) -> str | None:
    found = locations.of(reading, chunk, NEVER)
    return None if found is None else found.url


def test_what_comes_next_is_asked_for_with_what_is_needed_now() -> None:
    mirror, reading = Mirror(), Reading(MANIFEST, "grant", iter(CHUNKS))
    locations = LocationLookup(mirror, Clock())
    assert {url_of(locations, reading, chunk) for chunk in CHUNKS[:500]} == {"1"}
    assert mirror.asked == [CHUNKS[:500]]
    for chunk in CHUNKS:
        assert url_of(locations, reading, chunk)
    assert [len(asked) for asked in mirror.asked] == [500, 500, 200]
    assert [*chain.from_iterable(mirror.asked)] == CHUNKS


def test_what_was_taken_for_a_question_that_failed_is_asked_for_again() -> None:
    mirror, clock, down = Mirror(), Clock(), [True]

    def ask(manifest: Digest, digests: Sequence[Digest], bearer: str, stop: threading.Event) -> Locations:
        if down:
            down.pop()
            raise StoreUnavailableError("it is down")
        return mirror(manifest, digests, bearer, stop)

    reading, locations = Reading(MANIFEST, "grant", iter(CHUNKS)), LocationLookup(ask, clock)
    assert url_of(locations, reading, CHUNKS[0]) is None
    clock.now += 3
    for chunk in CHUNKS:
        assert url_of(locations, reading, chunk)
    assert [*chain.from_iterable(mirror.asked)] == CHUNKS


def test_threads_share_one_question_and_who_waits_is_in_the_next() -> None:
    mirror, clock = Mirror(gate=threading.Event()), Clock()
    locations, started = LocationLookup(mirror, clock), threading.Barrier(9)

    def need(chunk: Digest) -> str | None:
        if chunk != CHUNKS[0]:
            started.wait(60)
        return url_of(locations, Reading(MANIFEST, "grant"), chunk)

    with ThreadPoolExecutor(9) as threads:
        first = threads.submit(need, CHUNKS[0])
        assert mirror.entered.wait(60)
        others = [threads.submit(need, chunk) for chunk in CHUNKS[1:9]]
        started.wait(60)
        assert mirror.gate is not None
        mirror.gate.set()
        assert first.result(60) == "1"
        assert all(other.result(60) for other in others)
    assert sorted(map(str, [*chain.from_iterable(mirror.asked)])) == sorted(map(str, CHUNKS[:9]))  # nobody's twice


def test_an_address_is_asked_for_anew_before_it_ends_whatever_the_clocks_say() -> None:
    mirror, clock, reading = Mirror(seconds=100), Clock(), Reading(MANIFEST, "grant")
    locations = LocationLookup(mirror, clock)
    for seconds, url in ((0, "1"), (89, "1"), (2, "2"), (50, "2"), (3600, "3")):
        clock.now += seconds
        assert url_of(locations, reading, CHUNKS[0]) == url


def test_an_address_that_is_given_back_is_asked_for_anew() -> None:
    mirror, reading = Mirror(), Reading(MANIFEST, "grant")
    locations = LocationLookup(mirror, Clock())
    first = locations.of(reading, CHUNKS[0], NEVER)
    assert first is not None
    locations.forget(reading, CHUNKS[0], first)
    assert url_of(locations, reading, CHUNKS[0]) == "2"
    locations.forget(reading, CHUNKS[0], first)  # another thread's, which had the first one, too
    assert url_of(locations, reading, CHUNKS[0]) == "2"


def test_of_another_grant_nothing_is_known() -> None:
    mirror = Mirror()
    locations = LocationLookup(mirror, Clock())
    for bearer in ("grant", "grant", "another"):
        assert url_of(locations, Reading(MANIFEST, bearer), CHUNKS[0])
    assert mirror.bearers == ["grant", "another"]


def test_one_that_is_not_ours_or_is_damaged_keeps_no_other_from_its_address() -> None:
    mirror, clock = Mirror(unknown=CHUNKS[3], refused=CHUNKS[4]), Clock()
    locations = LocationLookup(mirror, clock)
    reading = Reading(MANIFEST, "grant", iter(CHUNKS[:10]))
    assert url_of(locations, reading, CHUNKS[0]) == "2"
    assert url_of(locations, reading, CHUNKS[3]) is None
    assert url_of(locations, reading, CHUNKS[4]) is None
    assert url_of(locations, reading, CHUNKS[5])


def test_an_answer_that_makes_no_sense_does_not_show_its_addresses() -> None:
    answer = {"delivery": "direct", "items": [{"digest": "b3:0", "url": "http://5igned", "headers": {"x": "5igned"}}]}
    with pytest.raises(ValidationError) as raised:
        Locations.model_validate(answer)
    assert "5igned" not in str(raised.value)


def test_where_tls_is_required_an_address_in_the_clear_is_not_used_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, reading = Clock(), Reading(MANIFEST, "grant")
    mirror = Mirror(place="HTTP://bucket.example/?5igned=")
    locations = LocationLookup(mirror, clock, requires_tls=True)
    assert [url_of(locations, reading, chunk) for chunk in CHUNKS[:3]] == [None, None, None]
    assert len(mirror.asked) == 1  # for a minute
    clock.now += 61
    assert url_of(locations, reading, CHUNKS[0]) is None
    (record,) = caplog.records
    assert "BDN_AGENT_TLS=require" in record.getMessage()
    assert "5igned" not in record.getMessage()
    for place in ("https://bucket.example/", "http://127.0.0.1:9000/"):
        mirror.place = place
        clock.now += 61
        assert str(url_of(locations, Reading(MANIFEST, place), CHUNKS[0])).startswith(place)


def test_what_is_kept_is_bounded() -> None:
    mirror, many = Mirror(), [named(f"many {number}") for number in range(9000)]
    locations = LocationLookup(mirror, Clock())
    for start in range(0, len(many), 500):
        url_of(locations, Reading(MANIFEST, "grant", iter(many[start:])), many[start])
    asked = len(mirror.asked)
    assert url_of(locations, Reading(MANIFEST, "grant"), many[-1])
    assert len(mirror.asked) == asked
    assert url_of(locations, Reading(MANIFEST, "grant"), many[0])
    assert len(mirror.asked) == asked + 1
