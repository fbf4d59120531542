"""Least recently used, kept by us."""

from __future__ import annotations

import pytest

from bdn.core.cache.recency import RecencyOrder
from tests.support.content.names import named

A, B, C = named("a"), named("b"), named("c")


def order_of(*touches: tuple[str, float]) -> RecencyOrder:
    order = RecencyOrder()
    for word, now in touches:
        order.touch(named(word), now)
    return order


def test_the_least_recently_used_comes_first() -> None:
    assert list(order_of(("a", 3), ("b", 1), ("c", 2)).oldest_first()) == [B, C, A]


def test_a_new_use_moves_a_manifest_to_the_end() -> None:
    assert list(order_of(("a", 1), ("b", 2), ("a", 3)).oldest_first()) == [B, A]


def test_equal_times_are_ordered_by_touch_and_a_later_touch_counts() -> None:
    assert list(order_of(("a", 1), ("b", 1), ("c", 1)).oldest_first()) == [A, B, C]
    assert list(order_of(("a", 1), ("b", 1), ("a", 1)).oldest_first()) == [B, A]


def test_a_clock_that_went_back_makes_nothing_older() -> None:
    order = order_of(("a", 10), ("b", 9), ("a", 2))
    assert order.last_used(A) == 10
    assert list(order.oldest_first()) == [B, A]


def test_what_is_forgotten_starts_anew() -> None:
    order = order_of(("a", 10), ("b", 5))
    order.forget(A)
    order.forget(A)
    assert list(order.oldest_first()) == [B]
    with pytest.raises(KeyError):
        order.last_used(A)
    order.touch(A, 1)
    assert list(order.oldest_first()) == [A, B]


def test_the_order_may_change_while_it_is_walked() -> None:
    order = order_of(("a", 1), ("b", 2))
    for manifest in order.oldest_first():
        order.forget(manifest)
    assert list(order.oldest_first()) == []
