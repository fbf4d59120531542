"""The kinds of events: what each must say, in which words, and to whom."""

import re
from dataclasses import replace
from typing import Any, Final

import pytest

from bdn.core.errors import Fact
from bdn.core.events import KINDS, Event, explanation, verdict
from bdn.wire.event_schema import NodeEvent

MANIFEST = f"b3:{'1' * 64}"
VALUES: Final[dict[type, Any]] = {str: "x", int: 7, float: 1_800_000_000.0, bool: True, list: ["job a", "job b"]}


def example(kind: str, **facts: Fact) -> Event:
    """One with a value for every fact."""
    given = {name: VALUES[known.types[0]] for name, known in KINDS[kind].facts.items()}
    return Event.of(kind, given | facts, manifest=MANIFEST, digest=MANIFEST, organisation="ours")


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_of_every_kind_survives_a_journal_says_more_than_its_kind_and_tells_others_no_names(kind: str) -> None:
    event = replace(example(kind), id="run/1", at=5.0)
    line = NodeEvent.of(event).model_dump_json()
    assert NodeEvent.model_validate_json(line).event("c", "n") == replace(event, cluster="c", node="n")

    assert len(event.sentence.split()) > 2
    assert not re.search(r"None|\{|\}", event.sentence)

    names = {"stage", "job", "eviction", "asked_by", "mirror", "source", "newcomer", "holders"} & event.facts.keys()
    secrets: dict[str, Any] = {
        name: [f"secret-{name}"] if isinstance(event.facts[name], list) else f"secret-{name}"
        for name in names
        if not isinstance(event.facts[name], int)
    }
    named = example(kind, **secrets)
    shown = named.seen_by("theirs")
    assert named.seen_by("ours") == named
    assert shown is None or "secret" not in f"{shown.sentence} {shown}"


@pytest.mark.parametrize("facts", [
    {"tier": "node"}, {"tier": "node", "bytes": "many"}, {"tier": "node", "bytes": True},
    {"tier": None, "bytes": 1}, {"tier": "node", "bytes": 1, "colour": "red"},
    {"tier": "node", "bytes": 1, "last_used": "now"},
])  # fmt: skip
def test_an_event_with_other_facts_than_its_kind_has_is_not_made(facts: dict[str, Fact]) -> None:
    with pytest.raises(ValueError, match=r"bytes|tier|colour|last_used"):
        Event.of("made_room", facts)


def test_what_another_version_has_written_is_shown_as_it_came() -> None:
    cases: list[tuple[str, dict[str, Fact], str]] = [
        ("invented_later", {"colour": "red"}, "invented_later (colour=red)"),
        ("made_room", {"bytes": "many"}, "made_room (bytes=many)"),
    ]
    for kind, facts, sentence in cases:
        event = NodeEvent(id="r/1", at=1.0, kind=kind, manifest=MANIFEST, organisation="ours", facts=facts).event()

        assert (event.sentence, event.shown_facts, event.presence) == (sentence, facts, None)
        assert event.seen_by("theirs") is None  # whose names it holds is not known
    newer = Event("dropped", facts={"why": "it was empty", "colour": "red"}, organisation="ours")
    assert (newer.sentence, newer.shown_facts) == ("was dropped: it was empty", {"why": "it was empty"})


def test_text_that_no_database_takes_is_made_harmless() -> None:
    event = Event.of("made_room", {"tier": "node", "bytes": 1, "job": "a\0b\udcff" + "x" * 5000})
    event = replace(event, id="r/1")

    assert event.facts["job"] == "a?b?" + "x" * 996
    assert NodeEvent.model_validate_json(NodeEvent.of(event).model_dump_json()).event() == event


def made(kind: str, /, **facts: Fact) -> Event:
    return Event.of(kind, facts, manifest=MANIFEST)


FOUND = made("found", bytes_total=5, bytes_whole=5)
GONE = made("made_room", tier="node", bytes=5, stage="stg_2", job="train-42")
COLLECTED = made("collected", bytes=5)
LOST = made("lost", tier="mirror", reason="its bytes are others")
GONE_FROM_CLUSTER = made("made_room", tier="cluster", bytes=5)
_NUMBERS: Final[dict[str, Fact]] = {"needed": 9, "free": 1, "leased": 4, "budget": 5}
REFUSED = made("refused", stage="stg_1", job="j", code="CACHE_FULL", **_NUMBERS, in_the_way=["job k"])
ARRIVED = made("arrived", stage="stg_1", job="j", node=0, cluster=0, mirror=5)


def story(*events: Event) -> list[Event]:
    return [replace(one, id=f"r/{number}", at=1_800_000_000.0 + number) for number, one in enumerate(events)]


@pytest.mark.parametrize(("events", "is_here", "because"), [
    ([], False, None), ([FOUND], True, FOUND), ([FOUND, GONE], False, GONE),
    ([FOUND, GONE_FROM_CLUSTER], True, FOUND), ([FOUND, GONE, ARRIVED], True, ARRIVED),
    ([FOUND, REFUSED], True, FOUND), ([REFUSED], False, None),
])  # fmt: skip
def test_the_last_that_was_decided_counts(events: list[Event], is_here: bool, because: Event | None) -> None:
    found = verdict(story(*events))

    assert (found.is_here, found.because and replace(found.because, id="", at=0.0)) == (is_here, because)


@pytest.mark.parametrize(("events", "is_here", "said"), [
    ([], False, "is not cached on n: no recorded event says that it ever arrived"),
    ([], True, "is cached on n: it arrived before the oldest recorded event"),
    ([FOUND, GONE], False, ("is not cached on n because at 2027-01-15 08:00:01Z it was evicted (5 B) as the least recently "
        "used, to make room for job train-42 (stage stg_2)")),
    ([ARRIVED], True, ("is cached on n because at 2027-01-15 08:00:00Z it was READY for job j (stage stg_1): 0 B were on this "
        "node, 0 B came from its cluster, 5 B from the mirror")),
    ([REFUSED], False, ("is not cached on n: at 2027-01-15 08:00:00Z it was not admitted for job j (stage stg_1) [CACHE_FULL]: 9 B "
        "more did not fit: of 5 B, 1 B were free and 4 B in use, by job k")),
    ([COLLECTED], False, "is not cached on n because at 2027-01-15 08:00:00Z it was collected from the mirror's store, which freed 5 B"),
    ([ARRIVED, LOST], True, ("is cached on n because at 2027-01-15 08:00:00Z it was READY for job j (stage stg_1): 0 B were on "
        "this node, 0 B came from its cluster, 5 B from the mirror")),
    ([GONE], True, ("is cached on n; the last recorded event says otherwise: at 2027-01-15 08:00:00Z it was evicted (5 B) as the "
        "least recently used, to make room for job train-42 (stage stg_2)")),
])  # fmt: skip
def test_a_place_is_explained_in_one_sentence(events: list[Event], is_here: bool, said: str) -> None:
    assert explanation(story(*events), "n", is_here=is_here) == said


@pytest.mark.parametrize(("event", "sentence"), [
    (replace(LOST, digest="b3:1"), "lost a part, which neither an agent nor its upstream has now: b3:1 in the tier mirror (its bytes are others)"),
    (made("lost", tier="node", reason="r", path="a/b"), "lost a part, which the next stage fetches again: None of a/b in the tier node (r)"),
    (made("evicted", tier="node", bytes=5, eviction="evi_1", asked_by="operator of acme", forced=True, holders=["job a", "job b"]),
        "was evicted (5 B) by force as operator of acme requested (evi_1), although it was in use by job a, job b"),
    (made("evicted", tier="cluster", bytes=5, last_used=1.8e9, eviction="", asked_by="", forced=False),
        "its chunks for the cluster were evicted (5 B, used last at 2027-01-15 08:00:00Z) on request"),
    (made("trimmed", tier="node", bytes=5, held=9, budget=7, allowed=8),
        "was evicted (5 B) because the tier held 9 B and other data fills the disk, which left the tier 7 B of 8 B"),
    (made("trimmed", tier="node", bytes=5, held=9, budget=8, allowed=8), "was evicted (5 B) because the tier held 9 B and its budget is 8 B now"),
    (GONE_FROM_CLUSTER, "its chunks for the cluster were evicted (5 B) as the least recently used, to make room for chunks of another manifest"),
    (made("made_room", tier="node", bytes=5), "was evicted (5 B) as the least recently used, to make room for a job of another organisation"),
    (made("ended", stage="pre_1", job="", ending="expired", expires_at=1.8e9),
        "is not leased for prefetch pre_1 any more: its lease expired at 2027-01-15 08:00:00Z"),
    (made("refused", stage="s", job="j", code="CACHE_FULL", **_NUMBERS, needed_files=3, free_files=2),
        "was not admitted for job j (stage s) [CACHE_FULL]: 3 more files did not fit: the file system had inodes for 2"),
    (made("refused", stage="s", job="j", code="CACHE_FULL", **_NUMBERS, needed_files=3),
        "was not admitted for job j (stage s) [CACHE_FULL]: 3 more files did not fit: the file system had inodes for None"),
    (made("dropped", why="{job} is a name"), "was dropped: {job} is a name"),
])  # fmt: skip
def test_what_a_sentence_says_depends_on_its_facts(event: Event, sentence: str) -> None:
    assert event.sentence == sentence
