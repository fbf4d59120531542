"""What the page says of a mirror: how far each source is, which is slowest, and what to do about an error."""

from datetime import UTC, datetime
from typing import Any

from bdn.mirror.page.mirror_view import listed_mirrors, mirror_view
from bdn.wire.mirror_schema import Mirror, MirrorSource
from bdn.wire.shapes import ErrorBody

CREATED = datetime.fromtimestamp(1_800_000_000 - 180, UTC)
GATED = ErrorBody(code="GATED_SOURCE", message="hf://org/x is gated", retryable=False)


def part(uri: str = "hf://org/model", status: Any = "SYNCING", **fields: Any) -> MirrorSource:
    return MirrorSource(source=uri, mount_location="/models/m", status=status, **fields)


def mirror(*sources: MirrorSource, status: Any = "SYNCING", **fields: Any) -> Mirror:
    return Mirror(id=f"mir_{'0' * 24}", status=status, created_at=CREATED, sources=list(sources), **fields)


def test_a_running_mirror__has_percent_rate_and_time_left() -> None:
    view = mirror_view(
        mirror(
            part(), bytes_total=1000, bytes_transferred=300, bytes_under_way=100, bytes_reused=100,
            bytes_per_second=5e6, eta_seconds=95, files_total=3,
        ),
    )  # fmt: skip

    assert (view.percent, view.bytes, view.rate, view.left) == (50, "500 B of 1 KB", "5 MB/s", "1m 35s")
    assert (view.created, view.files, view.took, view.is_running) == ("2027-01-15 07:57:00Z", "3 files", None, True)


def test_percent__is_unknown_without_a_total_and_100_only_when_ready() -> None:
    whole: dict[str, Any] = {"bytes_total": 5, "bytes_transferred": 5}

    assert mirror_view(mirror(part(), bytes_transferred=5)).percent is None
    assert mirror_view(mirror(part(), **whole)).percent == 99
    assert mirror_view(mirror(part(status="READY"), status="READY", bytes_total=0)).percent == 100
    assert mirror_view(mirror(part(status="READY", **whole), part(**whole))).sources[0].percent == 100


def test_the_slowest_source__has_the_smallest_part_done_and_is_named_only_among_several() -> None:
    half: dict[str, Any] = {"bytes_total": 10, "bytes_transferred": 5}
    tenth: dict[str, Any] = {"bytes_total": 1000, "bytes_transferred": 100}
    view = mirror_view(mirror(part("hf://a/a", **half), part("hf://b/b", **tenth)))
    assert view.slowest is not None
    assert view.slowest.source == "hf://b/b"

    assert mirror_view(mirror(part("hf://a/a", "READY"), part("hf://b/b", **tenth))).slowest is None
    ended = mirror(part("hf://a/a", **half), part("hf://b/b", **tenth), status="CANCELED")
    assert mirror_view(ended).slowest is None
    assert {line.status for line in mirror_view(ended).sources} == {"CANCELED"}


def test_an_error__comes_with_the_remedy_of_its_code() -> None:
    view = mirror_view(mirror(part(status="FAILED", error=GATED), status="FAILED", error=GATED))
    unknown = mirror_view(mirror(status="FAILED", error=GATED.model_copy(update={"code": "FROM_THE_FUTURE"})))

    assert view.problem is not None
    assert "Accept the terms" in view.problem.remedy
    assert view.sources[0].problem == view.problem
    assert unknown.problem is not None
    assert (unknown.problem.message, unknown.problem.remedy) == ("hf://org/x is gated", "")


def test_the_list__has_running_mirrors_first_then_failed_ones_and_few_sources_of_each() -> None:
    sources = [part(f"hf://org/{number}") for number in range(5)]
    given = [mirror(*sources, status=status) for status in ("READY", "FAILED", "PENDING", "CANCELED", "SYNCING")]
    views = listed_mirrors(given)

    assert [view.status for view in views] == ["SYNCING", "PENDING", "FAILED", "READY", "CANCELED"]
    assert {(len(view.sources), view.hidden) for view in views} == {(3, 2)}
