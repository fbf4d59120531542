"""Grants, verified by the mirror's keys. These come with heartbeats and are kept, because the mirror may be down."""

import json
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import jwt

from bdn.core.errors import BdnError, InternalError
from bdn.disk.durable import disk_errors, write_durably
from bdn.wire.grants import CacheGrant, Grant, GrantVerifier, PushGrant, UnknownKeyError

_Granted = TypeVar("_Granted")


class Trust:
    """Verifies grants. ``verify`` may be called from any thread; ``ask`` has the mirror send its keys now."""

    def __init__(self, path: Path, clock: Callable[[], float], ask: Callable[[], Awaitable[None]]) -> None:
        self._path = path
        self._clock = clock
        self._ask = ask
        self._verifier = GrantVerifier(())
        self._lock = threading.Lock()

    def load(self) -> None:
        """The keys of the last run. Blocking. A damaged file is as good as none: the next heartbeat brings the keys."""
        with suppress(OSError, jwt.PyJWTError, ValueError, KeyError, TypeError):
            self._verifier = GrantVerifier(json.loads(self._path.read_bytes()))

    def update(self, public_keys: list[dict[str, Any]]) -> None:
        """Believe these keys from now on, and only these. Blocking when they are new.

        Raises:
            InternalError: they are no keys; the old ones stay.
            DiskFailedError: they are believed, but could not be kept for the next start.
        """
        if not public_keys or public_keys == self._verifier.public_keys:
            return
        try:
            verifier = GrantVerifier(public_keys)
        except (jwt.PyJWTError, ValueError, KeyError, TypeError) as error:
            raise InternalError(f"the mirror sent public keys that cannot be used ({error})") from error
        self._verifier = verifier
        with self._lock, disk_errors(self._path):
            write_durably(self._path, json.dumps(public_keys).encode())

    def verify(self, token: str) -> Grant:
        """The grant, by the keys that are known. Raises ``GrantInvalidError``, ``GrantExpiredError``: as ``GrantVerifier.verify``."""
        return self._verifier.verify(token, now=self._clock())

    # The mirror is asked once for a key that is not known; while it is down, the key stays unknown.

    async def check(self, token: str) -> Grant:
        """The grant. Raises as ``verify``."""
        return await self._checked(lambda: self.verify(token))

    async def check_push(self, token: str) -> PushGrant:
        """The grant to push, likewise."""
        return await self._checked(lambda: self._verifier.verify_push(token, now=self._clock()))

    async def check_cache(self, token: str) -> CacheGrant:
        """The grant for training caches, likewise."""
        return await self._checked(lambda: self._verifier.verify_cache(token, now=self._clock()))

    async def _checked(self, verify: Callable[[], _Granted]) -> _Granted:
        try:
            return verify()
        except UnknownKeyError:
            with suppress(BdnError):
                await self._ask()
        return verify()
