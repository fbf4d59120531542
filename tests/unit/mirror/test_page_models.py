"""What the page says of a model: where it is, which jobs hold it, and why it is or is not on a node."""

from datetime import UTC, datetime
from typing import Any

import pytest

from bdn.core.events import KINDS, Event
from bdn.mirror.page.model_view import PLACES_SHOWN, model_view
from bdn.wire.event_schema import EventDocument
from bdn.wire.mirror_schema import HeldManifest, Holding

MANIFEST = f"b3:{'1' * 64}"
SOURCE = "hf://org/model"
GIVEN: dict[str, Any] = {
    "made_room": {"tier": "node", "bytes": 5, "stage": "stg_1", "job": "job-7", "newcomer": "hf://org/other"},
    "arrived": {"stage": "stg_1", "job": "job-7", "node": 0, "cluster": 0, "mirror": 5},
    "renewed": {"stage": "stg_1", "job": "job-7"},
}


def told(kind: str, node: str = "n1", *, cluster: str = "c", at: int = 1_800_000_000) -> EventDocument:
    assert kind in KINDS
    event = Event.of(kind, GIVEN[kind], manifest=MANIFEST)
    dated = {"id": f"{kind}-{node}-{at}", "at": datetime.fromtimestamp(at, UTC), "cluster": cluster, "node": node}
    return EventDocument.of(event).model_copy(update=dated)


def held(*, mirror: bool = True, **nodes: Holding) -> HeldManifest:
    names = {f"c/{node}": holding for node, holding in nodes.items()}
    return HeldManifest(manifest=MANIFEST, sources=[SOURCE], files_total=2, bytes_total=9, mirror=mirror, nodes=names)


def holding(*jobs: str, size: int = 9, **fields: Any) -> Holding:
    return Holding(manifest=MANIFEST, bytes=size, held_by=list(jobs), **fields)


def test_without_a_node__it_says_where_it_is_and_how_many_jobs_hold_it() -> None:
    view = model_view(MANIFEST, [], held(n1=holding("job-1", "job-2"), n2=holding(), n3=holding(size=0)), [])

    assert view.answers == ("It is cached on the mirror and 2 nodes; 2 jobs hold it.",)
    assert view.holders == ("job-1", "job-2")
    assert [(line.name, line.is_here) for line in view.places] == [
        ("the mirror", True), ("c/n1", True), ("c/n2", True), ("c/n3", False),
    ]  # fmt: skip
    assert (view.title, view.size, view.files) == (SOURCE, "9 B", "2 files")
    assert model_view(MANIFEST, [SOURCE], None, []).answers == ("No tier holds it now.",)


@pytest.mark.parametrize("node", ["n1", "c/n1"])
def test_with_a_node__it_says_why_it_is_not_there(node: str) -> None:
    events = [told("made_room", at=1_800_000_002), told("arrived"), told("arrived", "n2"), told("arrived", cluster="d")]
    view = model_view(MANIFEST, [], held(n2=holding()), events, node)

    assert view.answers[0] == (
        "It is not cached on node c/n1 because at 2027-01-15 08:00:02Z it was evicted (5 B) as the least recently used, "
        "to make room for job job-7 (stage stg_1), which brought hf://org/other."
    )
    assert [line.name for line in view.places] == (["c/n1"] if "/" in node else ["c/n1", "d/n1"])


def test_with_a_node_of_which_nothing_is_known__it_says_so() -> None:
    for node in ("n9", "c/n9"):
        (answer,) = model_view(MANIFEST, [], held(n1=holding()), [told("arrived")], node).answers
        assert answer == f"It is not cached on node {node}: no recorded event says that it ever arrived."


def test_events__that_changed_nothing_are_left_out() -> None:
    view = model_view(MANIFEST, [], None, [told("renewed"), told("made_room"), told("arrived")])

    assert [event.sentence.split()[0] + " " + event.place for event in view.events] == ["was c/n1", "was c/n1"]


def test_of_a_thousand_nodes__those_with_jobs_are_shown_and_the_rest_counted() -> None:
    nodes: dict[str, Any] = {f"n{number}": holding(*(["job-1"] if number == 999 else [])) for number in range(1000)}
    view = model_view(MANIFEST, [], held(**nodes), [])

    assert [line.name for line in view.places[:2]] == ["the mirror", "c/n999"]
    assert (len(view.places), view.hidden) == (PLACES_SHOWN, 1001 - PLACES_SHOWN)
    assert view.answers == ("It is cached on the mirror and 1000 nodes; 1 job holds it.",)


def test_an_incomplete_holding_and_chunks_for_the_cluster__are_said() -> None:
    view = model_view(MANIFEST, [], held(n1=holding(complete=False, cluster_bytes=7, last_used=1_800_000_000.0)), [])

    line = view.places[1]
    assert line.size == "9 B, incomplete and 7 B of chunks for its cluster"
    assert line.used == "2027-01-15 08:00:00Z"
