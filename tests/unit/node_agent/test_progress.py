from bdn.core.chunk import FileEntry, digest_of
from bdn.transfer.under_way import UnderWay
from bdn.wire.stage_schema import BytesFrom
from node_agent.fetch.fill_context import RetryBudget
from node_agent.fill.progress import FillProgress, Rate
from tests.support.content.layouts import manifest_of

A, B = FileEntry("a", 1, digest_of(b"a")), FileEntry("b", 2, digest_of(b"bb"))
NO_FAILURES = RetryBudget(0, list)


def test_what_is_held_already_comes_from_the_node() -> None:
    progress = FillProgress([manifest_of([A, B])], {B.digest}, NO_FAILURES)

    assert progress.bytes_from() == [BytesFrom(node=1)]


def test_a_content_under_several_paths_is_fetched_once_and_counted_everywhere() -> None:
    twice = FileEntry("again", 2, B.digest)
    progress = FillProgress([manifest_of([B, twice]), manifest_of([B])], {B.digest}, NO_FAILURES)

    progress.report(B.digest, "mirror", 2)
    progress.finish(B.digest, 2)

    assert progress.bytes_from() == [BytesFrom(node=2, mirror=2), BytesFrom(node=2)]


def test_a_restart_takes_back_what_was_reported() -> None:
    progress = FillProgress([manifest_of([B])], {B.digest}, NO_FAILURES)

    progress.report(B.digest, "mirror", 1)
    progress.restart(B.digest)

    assert progress.bytes_from() == [BytesFrom()]


def test_a_file_that_somebody_else_finished_comes_from_the_node() -> None:
    progress = FillProgress([manifest_of([B])], {B.digest}, NO_FAILURES)

    progress.finish(B.digest, 2)

    assert progress.bytes_from() == [BytesFrom(node=2)]


def test_what_is_under_way_counts_for_the_mount_that_it_comes_for_until_it_is_whole() -> None:
    progress = FillProgress([manifest_of([A]), manifest_of([B])], {A.digest, B.digest}, NO_FAILURES)

    reads = UnderWay()
    with progress.awaiting(B.digest, 2, lambda: reads), reads.read() as one, reads.read() as other:
        one.received, one.step = 1, "mirror"
        other.received, other.step = 5, "order"  # of a file beside it in the same slab
        assert (progress.bytes_under_way(), progress.transfer().chunks_at) == ([0, 2], {"mirror": 1, "order": 1})
        progress.finish(B.digest, 2)
        assert progress.bytes_under_way() == [0, 0]
    assert progress.transfer().chunks_at == {}
    assert progress.bytes_under_way() == [0, 0]


def test_the_rate_is_that_of_the_last_five_seconds() -> None:
    rate = Rate()
    assert rate.per_second(0.0) is None

    rate.add(1000, 10.0)
    rate.add(500, 12.0)
    assert rate.per_second(12.0) == 750
    assert rate.per_second(16.0) == 100
    assert rate.total == 1500
