"""Who needs which manifest."""

from __future__ import annotations

from bdn.core.cache.leases import LeaseBook
from tests.support.content.names import named, stage

A, B = named("a"), named("b")


def test_a_manifest_is_leased_from_the_first_holder_to_the_last() -> None:
    book = LeaseBook()
    assert not book.is_leased(A)
    book.take(A, stage("s1"))
    book.take(A, stage("s2"))
    assert book.end("s1") == (A,)
    assert book.is_leased(A)
    assert book.end("s2") == (A,)
    assert not book.is_leased(A)
    assert book.leased() == ()
    assert book.holders(A) == ()


def test_holders_are_named_oldest_lease_first() -> None:
    book = LeaseBook()
    for name in ("s2", "s1", "s3"):
        book.take(A, stage(name))
    assert [holder.stage_id for holder in book.holders(A)] == ["s2", "s1", "s3"]


def test_renewing_replaces_the_expiry_and_keeps_the_place() -> None:
    book = LeaseBook()
    book.take(A, stage("s1", until=10))
    book.take(A, stage("s2"))
    book.take(A, stage("s1", until=20))
    assert book.holders(A) == (stage("s1", until=20), stage("s2"))
    assert book.expired(10) == ()


def test_a_stage_gives_back_all_its_manifests_at_once_and_ending_again_changes_nothing() -> None:
    book = LeaseBook()
    for manifest in (A, B):
        book.take(manifest, stage("s1"))
    book.take(B, stage("s2"))
    assert book.end("s1") == (A, B)
    assert book.leased() == (B,)
    assert book.end("s1") == ()
    assert book.end("unknown") == ()


def test_expiry_is_inclusive_and_never_comes_without_a_time() -> None:
    book = LeaseBook()
    book.take(A, stage("s1", until=10))
    book.take(A, stage("s2"))
    assert book.expired(9.999) == ()
    assert book.expired(10) == (stage("s1", until=10),)
    assert book.expired(float("inf")) == (stage("s1", until=10),)


def test_a_stage_that_holds_two_manifests_expires_once() -> None:
    book = LeaseBook()
    for manifest in (A, B):
        book.take(manifest, stage("s1", until=10))
    assert book.expired(11) == (stage("s1", until=10),)


def test_an_expired_holder_counts_until_it_is_released() -> None:
    book = LeaseBook()
    book.take(A, stage("s1", until=10))
    assert book.expired(11)
    assert book.is_leased(A)
    assert book.holders(A)


def test_a_holder_is_shown_as_its_job_and_stage() -> None:
    assert str(stage("s1")) == "job job-s1 (stage s1)"
