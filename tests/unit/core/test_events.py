"""The vocabulary of decisions: each kind says what happened, and to whom it may say so."""

from __future__ import annotations

import ast
import dataclasses
import typing
from pathlib import Path
from typing import Any, Final

import pytest

from bdn.core.errors import Fact
from bdn.core.events.caches import EvictedOnRequest, Found, Lost, MadeRoom
from bdn.core.events.decision import Decision, Recorded
from bdn.core.events.kinds import KINDS
from bdn.core.events.mirrors import Collected
from bdn.core.events.stages import Arrived, Refused
from bdn.core.events.story import explanation, verdict
from bdn.wire.event_schema import Foreign, NodeEvent

ROOT: Final = Path(__file__).parents[3]
MANIFEST = f"b3:{'1' * 64}"
_FACTS: dict[str, Any] = {"str": "stg_1", "int": 7, "float": 1_800_000_000.0, "bool": True, "tuple": ("job a", "job b")}


def example(kind: type[Decision], **facts: Any) -> Decision:
    """One with a value for every fact."""
    hints = typing.get_type_hints(kind)
    given = {field.name: _value(hints[field.name]) for field in dataclasses.fields(kind)}
    return kind(**{**given, "manifest": MANIFEST, "digest": MANIFEST, "organisation": "ours", **facts})


def _value(hint: Any) -> Any:
    for option in (hint, *typing.get_args(hint)):
        name = getattr(typing.get_origin(option) or option, "__name__", "")
        if name in _FACTS:
            return _FACTS[name]
    return typing.get_args(hint)[0]  # a literal


def test_every_kind_that_is_defined_is_known_and_somebody_decides_it() -> None:
    ours = [kind for kind in _below(Decision) if kind.__module__.startswith("bdn.core.events")]
    assert {kind.kind for kind in ours if "kind" in vars(kind)} == KINDS.keys()
    named: set[str] = set()
    for path in [*(ROOT / "bdn").rglob("*.py"), *(ROOT / "node_agent").rglob("*.py")]:
        if not path.is_relative_to(ROOT / "bdn/core"):
            named |= _deciding(ast.parse(path.read_text()))
    assert {kind.__name__ for kind in KINDS.values()} - named == set()


def _below(kind: type[Decision]) -> set[type[Decision]]:
    return {one for below in kind.__subclasses__() for one in (below, *_below(below))}


def _deciding(tree: ast.AST) -> set[str]:
    """What is called, given to a call, or kept by outcome: annotations and imports decide nothing."""
    found: set[str] = set()
    for node in ast.walk(tree):
        uses: list[ast.expr | None] = []
        if isinstance(node, ast.Call):
            uses = [node.func, *node.args]
        elif isinstance(node, ast.Dict):
            uses = list(node.values)
        found |= {
            one.attr if isinstance(one, ast.Attribute) else one.id
            for one in uses
            if isinstance(one, ast.Attribute | ast.Name)
        }
    return found


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_a_decision_comes_out_of_a_journal_as_it_went_in(kind: type[Decision]) -> None:
    decision = example(kind)
    line = NodeEvent.of("run/1", 5.0, decision).model_dump_json()

    assert NodeEvent.model_validate_json(line).recorded("c", "n") == Recorded("run/1", 5.0, decision, "c", "n")


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_a_decision_says_more_than_its_kind(kind: type[Decision]) -> None:
    text = str(example(kind))

    assert len(text.split()) > 2
    assert "None" not in text
    assert "Decision" not in text


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_other_organisations_hear_no_names(kind: type[Decision]) -> None:
    names = {"stage", "job", "eviction", "asked_by", "mirror", "source", "newcomer"} & {
        field.name for field in dataclasses.fields(kind)
    }
    secret = {name: f"secret-{name}" for name in names}
    if "holders" in {field.name for field in dataclasses.fields(kind)}:
        secret["holders"] = ("secret-holder",)  # type: ignore[assignment]
    decision = example(kind, **secret)
    shown = decision.seen_by("theirs")

    assert decision.seen_by("ours") == decision
    assert shown is None or "secret" not in f"{shown} {shown.facts()}"


def test_what_another_version_has_written_is_shown_as_it_came() -> None:
    cases: list[tuple[str, dict[str, Fact]]] = [("invented_later", {"colour": "red"}), ("made_room", {"bytes": "many"})]
    for kind, facts in cases:
        event = NodeEvent(id="r/1", at=1.0, kind=kind, manifest=MANIFEST, facts=facts)
        decision = event.recorded().decision

        assert isinstance(decision, Foreign)
        assert str(decision).startswith(f"{kind} (")


def test_text_that_no_database_takes_is_made_harmless() -> None:
    decision = MadeRoom(manifest=MANIFEST, tier="node", bytes=1, job="a\0b\udcff" + "x" * 5000)
    event = NodeEvent.of("r/1", 1.0, decision)

    assert event.facts["job"] == "a?b?" + "x" * 996
    assert NodeEvent.model_validate_json(event.model_dump_json()) == event


FOUND = Found(manifest=MANIFEST, bytes_total=5, bytes_whole=5)
GONE = MadeRoom(manifest=MANIFEST, tier="node", bytes=5, stage="stg_2", job="train-42")
COLLECTED = Collected(manifest=MANIFEST, bytes=5)
LOST = Lost(manifest=MANIFEST, digest=MANIFEST, tier="mirror", reason="its bytes are others")
GONE_FROM_CLUSTER = MadeRoom(manifest=MANIFEST, tier="cluster", bytes=5)
REFUSED = Refused(
    manifest=MANIFEST,
    stage="stg_1",
    job="j",
    code="CACHE_FULL",
    needed=9,
    free=1,
    leased=4,
    budget=5,
    in_the_way=("job k",),
)
ARRIVED = Arrived(manifest=MANIFEST, stage="stg_1", job="j", node=0, cluster=0, mirror=5)


def story(*decisions: Decision) -> list[Recorded]:
    return [Recorded(f"r/{number}", 1_800_000_000.0 + number, one) for number, one in enumerate(decisions)]


@pytest.mark.parametrize(
    ("decisions", "is_here", "because"),
    [
        ([], False, None),
        ([FOUND], True, FOUND),
        ([FOUND, GONE], False, GONE),
        ([FOUND, GONE_FROM_CLUSTER], True, FOUND),
        ([FOUND, GONE, ARRIVED], True, ARRIVED),
        ([FOUND, REFUSED], True, FOUND),
        ([REFUSED], False, None),
    ],
)
def test_the_last_that_was_decided_counts(decisions: list[Decision], is_here: bool, because: Decision | None) -> None:
    found = verdict(story(*decisions))

    assert (found.is_here, found.because and found.because.decision) == (is_here, because)


@pytest.mark.parametrize(
    ("decisions", "is_here", "said"),
    [
        ([], False, "is not cached on n: nothing on record says that it ever came"),
        ([], True, "is cached on n: it came before the record"),
        ([FOUND, GONE], False, ("is not cached on n because at 2027-01-15 08:00:01Z it was evicted (5 B) as the least recently "
            "used, to make room for job train-42 (stage stg_2)")),
        ([ARRIVED], True, ("is cached on n because at 2027-01-15 08:00:00Z it was READY for job j (stage stg_1): 0 B were on this "
            "node, 0 B came from its cluster, 5 B from the mirror")),
        ([REFUSED], False, ("is not cached on n: at 2027-01-15 08:00:00Z it was not let in for job j (stage stg_1) [CACHE_FULL]: 9 B "
            "more did not fit: of 5 B, 1 B were free and 4 B in use, by job k")),
        ([COLLECTED], False, "is not cached on n because at 2027-01-15 08:00:00Z it was collected from the mirror's store: 5 B were its own"),
        ([ARRIVED, LOST], True, ("is cached on n because at 2027-01-15 08:00:00Z it was READY for job j (stage stg_1): 0 B were on "
            "this node, 0 B came from its cluster, 5 B from the mirror")),
        ([GONE], True, ("is cached on n; the last that is on record is another: at 2027-01-15 08:00:00Z it was evicted (5 B) as the "
            "least recently used, to make room for job train-42 (stage stg_2)")),
    ],
)  # fmt: skip
def test_a_place_is_explained_in_one_sentence(decisions: list[Decision], is_here: bool, said: str) -> None:
    assert explanation(story(*decisions), "n", is_here=is_here) == said


def test_what_is_lost_says_who_would_bring_it_again() -> None:
    assert str(LOST).startswith("lost a part, which neither an agent nor its upstream has now: b3:")
    on_node = dataclasses.replace(LOST, tier="node")
    assert str(on_node).startswith("lost a part, which the next stage brings again: b3:")


def test_force_names_the_holders_it_broke() -> None:
    forced = EvictedOnRequest(
        manifest=MANIFEST,
        tier="node",
        bytes=5,
        eviction="evi_1",
        asked_by="operator of acme",
        forced=True,
        holders=("job a",),
    )

    assert (
        str(forced) == "was evicted (5 B) by force as operator of acme asked (evi_1), although it was in use by job a"
    )
