"""A node's disk space, each content once."""

from __future__ import annotations

import pytest

from bdn.core.cache.ledger import SpaceLedger
from tests.support.content.names import named

A, B = named("a"), named("b")


def test_reserved_space_is_used_before_its_first_byte_and_moves_when_it_is_whole() -> None:
    ledger = SpaceLedger()
    ledger.reserve(A, 5)
    assert (ledger.reserved_bytes, ledger.committed_bytes, ledger.used_bytes) == (5, 0, 5)
    assert ledger.size_of(A) == 5
    assert not ledger.is_committed(A)
    ledger.commit(A)
    assert (ledger.reserved_bytes, ledger.committed_bytes, ledger.used_bytes) == (0, 5, 5)
    assert ledger.size_of(A) == 5
    assert ledger.is_committed(A)


@pytest.mark.parametrize("whole", [False, True])
def test_content_that_is_counted_already_is_not_reserved_again(whole: bool) -> None:
    ledger = SpaceLedger()
    ledger.reserve(A, 5)
    if whole:
        ledger.commit(A)
    with pytest.raises(ValueError, match="is counted already"):
        ledger.reserve(A, 7)
    assert ledger.used_bytes == 5


def test_empty_content_is_counted_too() -> None:
    ledger = SpaceLedger()
    ledger.reserve(A, 0)
    assert ledger.size_of(A) == 0
    with pytest.raises(ValueError, match="is counted already"):
        ledger.reserve(A, 0)


def test_committing_twice_changes_nothing() -> None:
    ledger = SpaceLedger()
    ledger.reserve(A, 5)
    ledger.commit(A)
    ledger.commit(A)
    assert (ledger.reserved_bytes, ledger.committed_bytes) == (0, 5)


def test_committing_what_was_never_reserved_is_a_bug_of_the_caller() -> None:
    with pytest.raises(KeyError):
        SpaceLedger().commit(A)


def test_releasing_returns_what_was_counted_whole_or_partial() -> None:
    ledger = SpaceLedger()
    ledger.reserve(A, 5)
    ledger.reserve(B, 3)
    ledger.commit(B)
    assert ledger.release(A) == 5
    assert (ledger.reserved_bytes, ledger.committed_bytes) == (0, 3)
    assert ledger.release(B) == 3
    assert ledger.release(B) == 0
    assert ledger.used_bytes == 0
    assert ledger.size_of(A) is ledger.size_of(B) is None
    assert not ledger.is_committed(B)
