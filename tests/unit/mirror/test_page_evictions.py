"""What the page says of an eviction before and after it, and when it may be carried out."""

from datetime import UTC, datetime
from typing import Any

import pytest

from bdn.core.errors import InvalidRequestError
from bdn.mirror.page.eviction_view import ITEMS_SHOWN, confirmed, eviction_view, plan_request, restorable
from bdn.wire.mirror_schema import HeldManifest
from bdn.wire.operation_schema import EvictedItem, Eviction, EvictionRequest

NOW = 1_800_000_000.0
UNTIL = datetime.fromtimestamp(NOW + 7 * 86400, UTC)
MANIFEST = f"b3:{'1' * 64}"
SOURCE = "hf://org/model"


def node_item(node: str = "n1", *holders: str, size: int = 10, **fields: Any) -> EvictedItem:
    given: dict[str, Any] = {"tier": "node", "cluster": "c", "node": node, "manifest": MANIFEST, "bytes": size}
    return EvictedItem(**{**given, "sources": [SOURCE], "holders": list(holders), **fields})


def mirror_item(*holders: str, size: int = 4, **fields: Any) -> EvictedItem:
    given: dict[str, Any] = {"tier": "mirror", "manifest": MANIFEST, "bytes": size, "restorable_until": UNTIL}
    return EvictedItem(**{**given, "sources": [SOURCE], "holders": list(holders), **fields})


def eviction(*items: EvictedItem, is_plan: bool = True, age: float = 1.0, **fields: Any) -> Eviction:
    going = [item for item in items if not item.refused]
    kept = [item for item in going if item.restorable_until]
    ended = datetime.fromtimestamp(NOW - age, UTC)
    given: dict[str, Any] = {
        "id": f"evi_{'0' * 24}", "status": "DONE", "created_at": ended, "completed_at": ended, "items": list(items),
        "request": EvictionRequest(source=SOURCE, dry_run=is_plan, force=is_plan),
        "bytes_freed": sum(item.bytes for item in going), "bytes_kept": sum(item.bytes for item in kept),
        "kept_until": UNTIL if kept else None,
    }  # fmt: skip
    return Eviction(**{**given, **fields})


def held(*, mirror: bool) -> dict[str, HeldManifest]:
    one = HeldManifest(manifest=MANIFEST, sources=[SOURCE], files_total=1, bytes_total=4, mirror=mirror, nodes={})
    return {MANIFEST: one}


def test_a_plan__says_what_is_free_now_and_later_and_which_jobs_it_hurts() -> None:
    agents = "job job-7 (stage stg_0123456789abcdef01234567)"
    view = eviction_view(eviction(node_item("n2"), node_item("n1", agents), mirror_item("job-7 on n1")), {}, NOW)

    assert (view.now, view.later, view.until) == ("20 B", "4 B", "2027-01-22 08:00:00Z")
    assert [(one.text, one.job) for one in view.holders] == [("job job-7 on n1", "job-7")]
    assert "lose the files" in view.harm
    assert "keep the files" in eviction_view(eviction(mirror_item("job-7 on n1")), {}, NOW).harm
    assert [line.place for line in view.items] == ["c/n1", "the mirror", "c/n2"]
    assert (view.typed, view.can_confirm, view.can_undo) == (SOURCE, True, False)


def test_a_plan_that_hurts_no_job__needs_no_typing() -> None:
    view = eviction_view(eviction(node_item(), mirror_item()), {}, NOW)

    assert (view.typed, view.can_confirm, view.holders) == (None, True, ())


def test_what_is_refused__stays_and_offers_nothing_to_confirm() -> None:
    view = eviction_view(eviction(mirror_item("mirror mir_1", refused=True, restorable_until=None)), {}, NOW)

    assert (view.now, view.later, view.typed, view.can_confirm) == ("0 B", None, None, False)
    assert [(line.fate, line.holders[0].text) for line in view.items] == [("stays: in use", "mirror mir_1")]


@pytest.mark.parametrize(
    ("items", "mirror", "said"),
    [
        ([node_item()], True, ["A stage that needs it again fetches 10 B from the cluster or the mirror."]),
        ([node_item()], False, ["10 B on nodes is not on the mirror afterwards: mirror it again before a stage needs it."]),
        (
            [node_item(), mirror_item()],
            True,
            [
                "10 B on nodes is not on the mirror afterwards: mirror it again before a stage needs it.",
                "It can be restored until 2027-01-22 08:00:00Z. After that its bytes have to come from its upstream again.",
            ],
        ),
        (
            [mirror_item(sources=["bt://llama@job1/checkpoint-1"], restorable_until=None)],
            True,
            ["Then 1 checkpoint without an upstream is lost for good."],
        ),
    ],
)  # fmt: skip
def test_a_plan__says_how_it_comes_back(items: list[EvictedItem], mirror: bool, said: list[str]) -> None:
    assert list(eviction_view(eviction(*items), held(mirror=mirror), NOW).returns) == said


def test_an_eviction__can_be_undone_while_the_mirror_can_restore_it() -> None:
    done = eviction(node_item(), mirror_item(), is_plan=False)

    assert eviction_view(done, held(mirror=False), NOW).can_undo
    assert not eviction_view(done, held(mirror=False), UNTIL.timestamp()).can_undo
    undone = eviction_view(done, held(mirror=True), NOW)
    assert (undone.can_undo, undone.is_undone) == (False, True)
    assert restorable(done, NOW) == [MANIFEST]
    assert restorable(eviction(mirror_item()), NOW) == []
    assert restorable(eviction(mirror_item("mirror mir_1", refused=True), is_plan=False), NOW) == []


def test_force__is_used_only_for_holders_that_the_plan_named_and_after_the_source_was_typed() -> None:
    free, used = eviction(node_item()), eviction(node_item("n1", "job j (stage stg_1)"))

    assert confirmed(free, "", NOW) == EvictionRequest(source=SOURCE)
    assert confirmed(used, f" {SOURCE} ", NOW) == EvictionRequest(source=SOURCE, force=True, plan=used.id)
    for typed in ("", "hf://org/mode", MANIFEST):
        with pytest.raises(InvalidRequestError, match=f"type {SOURCE}"):
            confirmed(used, typed, NOW)


def test_only_a_complete_and_recent_plan__is_carried_out() -> None:
    with pytest.raises(InvalidRequestError, match="not a plan"):
        confirmed(eviction(node_item(), is_plan=False), "", NOW)
    with pytest.raises(InvalidRequestError, match="not complete"):
        confirmed(eviction(node_item(), status="RUNNING", completed_at=None), "", NOW)
    with pytest.raises(InvalidRequestError, match="older than 10 minutes"):
        confirmed(eviction(node_item(), age=601), "", NOW)


def test_a_manifest_without_a_known_source__is_confirmed_by_its_digest() -> None:
    request = EvictionRequest(manifest=MANIFEST, dry_run=True)
    bare = eviction(node_item("n1", "job j (stage stg_1)", sources=[]), request=request)

    assert eviction_view(bare, {}, NOW).typed == MANIFEST
    assert confirmed(bare, MANIFEST, NOW).force


def test_a_plan__is_requested_by_source_or_digest_for_a_tier_and_a_node() -> None:
    assert plan_request(SOURCE, tier="node", node="c/n1", is_operator=True) == EvictionRequest(
        source=SOURCE, tier="node", cluster="c", node="n1", dry_run=True, force=True
    )
    assert plan_request(MANIFEST, tier="mirror", node=None, is_operator=False) == EvictionRequest(
        manifest=MANIFEST, tier="mirror", dry_run=True
    )


def test_of_thousands_of_items__those_with_jobs_are_shown_first() -> None:
    items = [node_item(f"n{number}", *(["job j (stage stg_1)"] if number == 999 else [])) for number in range(1000)]
    view = eviction_view(eviction(*items), {}, NOW)

    assert view.items[0].place == "c/n999"
    assert (len(view.items), view.hidden, view.now) == (ITEMS_SHOWN, 1000 - ITEMS_SHOWN, "10 KB")
