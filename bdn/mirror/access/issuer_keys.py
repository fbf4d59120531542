"""The public keys of a cluster's issuer of tokens (JWKS, RFC 7517), from its address or a file."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2
import jwt

from bdn.core.errors import BdnError, InvalidRequestError, StoreUnavailableError, UnauthenticatedError
from bdn.mirror.access.clusters import KubernetesCluster
from bdn.net.client import read_token
from bdn.net.tls import Authorities
from bdn.wire.http_fields import authorization, is_loopback

logger = logging.getLogger(__name__)
# Asymmetric ones alone: with HS256, the published key would sign tokens.
ALGORITHMS: Final = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)
REFRESH_SECONDS: Final = 600.0  # after which a key that the issuer removed is not trusted any more
_PAUSE_SECONDS: Final = 60.0  # between two requests, so that tokens with invented key ids cost the issuer nothing
_FETCH_SECONDS: Final = 10.0
_LARGEST: Final = 256 * 1024  # bytes of the document
_MOST_KEYS: Final = 100


class KeysUnavailableError(StoreUnavailableError):
    """Retryable, unlike a token that is refused."""

    template = "the keys of Kubernetes cluster {cluster!r}, which sign its tokens, cannot be read: {reason}"
    cluster: str


class IssuerKeys:
    """Keys by id, read again when an id is unknown. One event loop.

    Keys that were read stay in use while the issuer cannot be reached.
    """

    def __init__(self, name: str, cluster: KubernetesCluster, clock: Callable[[], float] = time.monotonic) -> None:
        """Blocking. Raises ``InvalidRequestError`` if the file of authorities cannot be used."""
        self._name = name
        self._cluster = cluster
        self._clock = clock
        self._authorities = Authorities(cluster.keys_ca, setting=f"BDN_KUBERNETES: clusters.{name}.keys_ca")
        self._keys: dict[str, jwt.PyJWK] = {}
        self._reads_at = clock()
        self._failure = ""
        self._lock = asyncio.Lock()

    def has(self, key_id: str) -> bool:
        return key_id in self._keys

    async def find(self, key_id: str) -> jwt.PyJWK:
        """The key of this id. Callers with a known key never wait.

        Raises:
            UnauthenticatedError: the issuer publishes no such key.
            KeysUnavailableError: the keys could not be read now.
        """
        if key_id not in self._keys:
            await self.refresh()
        if (found := self._keys.get(key_id)) is not None:
            return found
        if self._failure:
            raise KeysUnavailableError(self._failure, self._name)
        raise UnauthenticatedError(
            f"the service-account token is signed with a key that cluster {self._name!r} does not publish; its keys are "
            f"read again at most every {_PAUSE_SECONDS:g} s"
        )

    async def refresh(self) -> None:
        """Read the keys, unless that was done a moment ago. A failure is logged, and the old keys stay."""
        async with self._lock:  # callers wait for a read that is under way
            if self._clock() < self._reads_at:
                return
            self._reads_at = self._clock() + _PAUSE_SECONDS
            try:
                async with asyncio.timeout(_FETCH_SECONDS):
                    self._keys = _parsed(await self._read())
            except (BdnError, OSError, ValueError, RecursionError, httpx2.HTTPError) as error:
                self._fail(str(error) or type(error).__name__)
            else:
                self._failure = ""

    def _fail(self, problem: str) -> None:
        if not self._failure:
            logger.warning(
                "cannot read the keys of Kubernetes cluster %s at %s: %s; keeping %d keys that were read before",
                self._name,
                self._cluster.keys,
                problem,
                len(self._keys),
            )
        self._failure = problem

    async def _read(self) -> bytes:
        if not self._cluster.is_at_address:
            return await asyncio.to_thread(_content_of, Path(self._cluster.keys))
        address, token_file = self._cluster.keys, self._cluster.keys_token_file
        token = None if token_file is None else await asyncio.to_thread(read_token, token_file)
        context = await asyncio.to_thread(self._authorities.context)
        is_near = is_loopback(urlsplit(address).hostname or "")
        async with (
            httpx2.AsyncClient(verify=context, trust_env=not is_near, timeout=_FETCH_SECONDS) as client,
            client.stream("GET", address, headers=authorization(token)) as answer,
        ):
            if answer.status_code != 200:
                raise InvalidRequestError(f"status {answer.status_code}")
            content = bytearray()
            async for piece in answer.aiter_bytes():
                content += piece
                _check_size(len(content))
            return bytes(content)


def _check_size(size: int) -> None:
    if size > _LARGEST:
        raise InvalidRequestError(f"it has more than {_LARGEST} bytes")


def _content_of(file: Path) -> bytes:
    with file.open("rb") as opened:
        content = opened.read(_LARGEST + 1)
    _check_size(len(content))
    return content


def _parsed(content: bytes) -> dict[str, jwt.PyJWK]:
    """The keys that sign tokens. One that this library does not know is skipped, as RFC 7517, section 5, asks."""
    document: Any = json.loads(content)
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list) or len(listed) > _MOST_KEYS:
        raise InvalidRequestError(f"it is not a key set (JWKS) of at most {_MOST_KEYS} keys")
    keys: dict[str, jwt.PyJWK] = {}
    for each in listed:
        if not isinstance(each, dict) or each.get("use") not in (None, "sig"):
            continue
        try:
            key = jwt.PyJWK(each)
        except (jwt.PyJWTError, ValueError, TypeError, KeyError):
            continue
        if isinstance(key.key_id, str) and key.algorithm_name in ALGORITHMS:
            keys[key.key_id] = key
    if not keys:
        raise InvalidRequestError("it has no public key that signs tokens")
    return keys
