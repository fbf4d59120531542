"""Verifies grants by the mirror's keys, which come with heartbeats and are stored because the mirror may be down."""

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
    """``verify`` may be called from any thread; ``ask`` requests the mirror's keys now."""

    def __init__(self, path: Path, clock: Callable[[], float], ask: Callable[[], Awaitable[None]]) -> None:
        self._path = path
        self._clock = clock
        self._ask = ask
        self._verifier = GrantVerifier(())
        self._lock = threading.Lock()

    def load(self) -> None:
        """Load the stored keys. Blocking. A damaged file is ignored: the next heartbeat contains the keys."""
        with suppress(OSError, jwt.PyJWTError, ValueError, KeyError, TypeError):
            self._verifier = GrantVerifier(json.loads(self._path.read_bytes()))

    def update(self, public_keys: list[dict[str, Any]]) -> None:
        """Trust these keys only, from now on. Blocking if they are new.

        Raises:
            InternalError: the keys cannot be used; the old ones stay trusted.
            DiskFailedError: the keys are trusted, but not stored for the next start.
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
        """Verify with the known keys. Raises ``GrantInvalidError``, ``GrantExpiredError``."""
        return self._verifier.verify(token, now=self._clock())

    # An unknown key is requested from the mirror once per call; while the mirror is down, the key stays unknown. The
    # checks raise as ``verify``.

    async def check(self, token: str) -> Grant:
        return await self._checked(lambda: self.verify(token))

    async def check_push(self, token: str) -> PushGrant:
        return await self._checked(lambda: self._verifier.verify_as(PushGrant, token, now=self._clock()))

    async def check_cache(self, token: str) -> CacheGrant:
        return await self._checked(lambda: self._verifier.verify_as(CacheGrant, token, now=self._clock()))

    async def _checked(self, verify: Callable[[], _Granted]) -> _Granted:
        try:
            return verify()
        except UnknownKeyError:
            with suppress(BdnError):
                await self._ask()
        return verify()
