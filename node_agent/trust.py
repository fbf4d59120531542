"""Whose signatures this agent believes. The keys come with heartbeats and are kept, because the mirror may be down."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jwt

from bdn.core.errors import InternalError
from bdn.disk.durable import disk_errors, write_durably
from bdn.wire.grants import CacheGrant, Grant, GrantVerifier, PushGrant


class Trust:
    """Verifies grants without asking anybody. ``verify`` may be called from any thread."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
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

    def verify_cache(self, token: str) -> CacheGrant:
        """The grant for training caches. Raises as ``GrantVerifier.verify`` does."""
        return self._verifier.verify_cache(token, now=self._clock())

    def verify(self, token: str) -> Grant:
        """The grant. Raises ``GrantInvalidError``, ``GrantExpiredError``: as ``GrantVerifier.verify``."""
        return self._verifier.verify(token, now=self._clock())

    def verify_push(self, token: str) -> PushGrant:
        """The grant to push, likewise."""
        return self._verifier.verify_push(token, now=self._clock())
