"""Asking upstreams without patience: for whoever asks on a user's behalf just once, and for tests of a single request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

_Answer = TypeVar("_Answer")


class AskOnce:
    """An ``Asker`` that knows no limits and never asks again."""

    async def ask(self, url: str, request: Callable[[], Awaitable[_Answer]]) -> _Answer:  # noqa: ARG002
        """The answer or the failure."""
        return await request()


ASK_ONCE: Final = AskOnce()
