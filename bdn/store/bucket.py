"""Requests to one bucket from byte threads: signed, retried and paced, with errors that name the remedy.

An object's bytes are read into an anonymous file in memory, which can be read, hashed and sent like any other file.
"""

import io
import mmap
import os
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, Final, Self, TypeVar

from bdn.core.chunk import CHUNK_SIZE, Buffer
from bdn.core.errors import (
    BdnError,
    StoreUnavailableError,
    UpstreamError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.pace.limit import Outcome, Pace, PaceRule, outcome_of
from bdn.core.pace.retry import Outage, RetryPolicy, StallPolicy, asked_to_wait
from bdn.core.pace.shares import Place, Shares
from bdn.core.source.uri import BucketUri
from bdn.disk.syscalls import REFUSED
from bdn.net.http1.answer import Answer
from bdn.net.http1.connection import ProtocolError
from bdn.net.http1.pool import NETWORK_ERRORS, ConnectionPool, reason_of
from bdn.sources.bucket_source import PAGE, BucketPage, NotAListingError
from bdn.sources.s3.answers import BAD_CREDENTIALS, OTHER_REGION, SLOW_DOWN, read_page
from bdn.store.access import BucketAccess, Dialect, Pairs
from bdn.store.boot_clock import since_boot
from bdn.wire.http_fields import parse_retry_after

_Result = TypeVar("_Result")
# Time limits of retries. A waiting reader has other sources, and a copy is repeated as a whole.
PATIENCE: Final = RetryPolicy(outage_seconds=20.0, attempts=4, longest_seconds=4.0, longest_retry_after_seconds=20.0)
AT_ONCE: Final = 32  # maximum requests in flight
OPEN_AT_ONCE: Final = 48  # chunks in memory being sent to clients, at most 8 MiB each; half for one organisation
_OWN_AT_ONCE: Final = 8  # likewise for the store itself and copies, which close theirs soon
_OWN_SECONDS: Final = 30.0  # time limit for one of these to be closed
_LISTING: Final = 8 * 1024 * 1024  # maximum bytes of a listing's page
_SMALL: Final = 64 * 1024  # maximum bytes of other answers
_TIMEOUT_SECONDS: Final = 30.0
_CHECK_SECONDS: Final = 4.0  # shorter than the timeouts of health checks
_BEGIN_SECONDS: Final = 40.0  # no attempt begins later, so a hanging bucket fails within two timeouts
_LONGEST_PAUSE_SECONDS: Final = (
    30.0  # even if a server requests a longer one: a single answer must not close the store for an hour
)
_STALL: Final = StallPolicy()
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9.]{1,60})</Code>")


class FailedOnItError(Exception):
    """Cause of a ``StoreUnavailableError``: the server answered, and this request failed.

    Other requests may succeed.
    """


@dataclass(frozen=True, slots=True)
class _Request:
    """``but`` are error statuses that count as an answer; ``expected`` is the number of bytes to come.

    After ``until``, by ``since_boot``, the request is not sent; with it, only a rate-limited request is repeated.
    """

    method: str
    key: str
    headers: Pairs = ()
    content: bytes | Buffer | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    but: tuple[int, ...] = ()
    expected: int = 0
    until: float | None = None


class ChunkInMemory(io.FileIO):
    """An object's bytes. ``release`` is called once, on close."""

    def __init__(self, descriptor: int, release: Callable[[], object]) -> None:
        super().__init__(descriptor, "rb")
        self._release = release

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._release()


class ChunkBuffers:
    """Memory for ``count`` chunks, shared by organisation. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._shares = Shares(count, spares=True)
        self._lock = threading.Lock()

    def acquire(self, organisation: str) -> Callable[[], None] | None:
        """Returns the function that releases one chunk's memory; None while the organisation is at its share."""
        with self._lock:
            place = self._shares.request(organisation)
            self._shares.grant()
            if place.is_granted:
                return partial(self._release, place)
            self._shares.release(place)
        return None

    def _release(self, place: Place) -> None:
        with self._lock:
            self._shares.release(place)


class Turns:
    """Requests in flight: limited to the server's capacity, round robin over organisations, paused at its request."""

    def __init__(self, where: str, most: int) -> None:
        self._where = where
        self._shares = Shares(0)
        self._pace = Pace(PaceRule(most, longest_pause_seconds=_LONGEST_PAUSE_SECONDS), time.monotonic())
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        return self._shares.waiting

    @contextmanager
    def turn(self, size: int, seconds: float | None = None, owner: str = "") -> Iterator[None]:
        """Hold a turn for one request of ``owner``, which moves ``size`` bytes.

        Raises:
            UpstreamRateLimitedError: at once, while the server asks for a pause.
            UpstreamUnavailableError: there was no turn within ``seconds``, unless None.
        """
        with self._changed:
            place = self._shares.request(owner)
            self._grant()
            try:
                began = self._wait(place, seconds)
            except BaseException:
                self._shares.release(place)
                self._grant()
                raise
            self._pace.take()
            self._pace.began(began)
        outcome, asked = Outcome.ARRIVED, None
        try:
            yield
        except BaseException as error:
            outcome, asked = outcome_of(error), asked_to_wait(error) if isinstance(error, BdnError) else None
            raise
        finally:
            with self._changed:
                now = time.monotonic()
                self._pace.ended(now, outcome, size, now - began, asked)
                self._pace.give_back()
                self._shares.release(place)
                self._grant()

    def _wait(self, place: Place, seconds: float | None) -> float:
        """Returns the time at which the request is sent: now."""
        if not self._changed.wait_for(lambda: place.is_granted, seconds):
            raise UpstreamUnavailableError(self._where, "earlier requests are still unanswered")
        now = time.monotonic()
        if (pause := self._pace.closed_until - now) > 0:
            raise UpstreamRateLimitedError(self._where, pause)
        return now

    def _grant(self) -> None:
        self._shares.count = self._pace.limit
        if self._shares.grant():
            self._changed.notify_all()


@dataclass
class Bucket:
    """Each method is one request, retried for a while. Blocking; thread-safe.

    All raise ``StoreUnavailableError``, which contains no secret and no signed address.
    """

    uri: BucketUri
    access: BucketAccess
    patience: RetryPolicy = PATIENCE
    pause: Callable[[float], None] = time.sleep
    owner: str = ""  # the organisation that requests are for; empty: the store itself
    _closed: threading.Event = field(default_factory=threading.Event, init=False)
    _connections: ConnectionPool = field(init=False)
    _check_connections: ConnectionPool = field(init=False)

    def __post_init__(self) -> None:
        self._where = str(self.uri)
        self._connections = ConnectionPool(timeout_seconds=_TIMEOUT_SECONDS)  # no egress rule: the operator's server
        self._check_connections = ConnectionPool(timeout_seconds=_CHECK_SECONDS, idle_limit=1)
        self._turns = Turns(self._where, AT_ONCE)
        self._room, self._own_room = ChunkBuffers(OPEN_AT_ONCE), threading.BoundedSemaphore(_OWN_AT_ONCE)

    @property
    def dialect(self) -> Dialect:
        return self.access.dialect

    def put(self, key: str, content: bytes | Buffer, headers: Pairs = (), but: tuple[int, ...] = ()) -> bool:
        """Write the object. Returns False if the status was one of ``but``."""
        return self._ask(_Request("PUT", key, headers, content, but=but), _heard) is not None

    def head(self, key: str) -> Mapping[str, str] | None:
        """The object's headers. None if it is absent; an absent bucket raises."""
        found = self._ask(_Request("HEAD", key, but=(404,)), lambda answer: answer.headers)
        if found is None:
            self.list_some(key, 1)  # the answer to HEAD does not show whether the bucket is missing
        return found

    def of(self, organisation: str) -> Self:
        """The same bucket, with shared connections, limits and memory, for requests on behalf of an organisation."""
        same = copy(self)
        same.owner = organisation
        return same

    @contextmanager
    def with_new_connections(self) -> Iterator[Self]:
        """The same bucket with fresh connections: a server may close an idle one at any time, even during a request."""
        same = copy(self)
        same._connections = ConnectionPool(timeout_seconds=_TIMEOUT_SECONDS)  # noqa: SLF001 - its own
        try:
            yield same
        finally:
            same._connections.close()  # noqa: SLF001

    def get(self, key: str, *, for_reader: bool = False) -> BinaryIO | None:
        """The object's bytes, cut off at one byte more than a chunk. None if it is absent.

        Waits while too many chunks are open. ``for_reader``: memory counts as the organisation's, and fails at once
        when it is at its share: threads that wait for each other would never close a chunk.
        """
        release = self._memory(for_reader=for_reader)
        descriptor = -1
        try:
            descriptor = _memory_file()
            request = _Request("GET", key, but=(404,), expected=CHUNK_SIZE)
            found = self._ask(request, partial(_fill, descriptor))
            if found is not None:
                return ChunkInMemory(descriptor, release)
        except OSError as error:
            _drop(descriptor, release)
            raise StoreUnavailableError(f"no memory for a chunk: {error.strerror}") from error
        except BaseException:
            _drop(descriptor, release)
            raise
        _drop(descriptor, release)
        return None

    def _memory(self, *, for_reader: bool) -> Callable[[], object]:
        """Memory for one chunk. Returns the function that releases it. Raises ``StoreUnavailableError``."""
        if for_reader:
            release = self._room.acquire(self.owner)
            if release is None:
                raise StoreUnavailableError(f"too many chunks of {self._where} are being sent; try again")
            return release
        if not self._own_room.acquire(timeout=_OWN_SECONDS):
            raise StoreUnavailableError(f"{_OWN_AT_ONCE} chunks of {self._where} are being read; try again")
        return self._own_room.release

    def delete(self, key: str) -> None:
        """Remove the object, if present, with retries: only for names that are never put again."""
        self._ask(_Request("DELETE", key, but=(404,)), _heard)

    def delete_once(self, key: str, until: float) -> None:
        """Remove the object, if present. No request is sent after ``until``, by ``since_boot``.

        Raises ``StoreUnavailableError``: the object may have been removed, or may be later.
        """
        self._ask(_Request("DELETE", key, but=(404,), until=until), _heard)

    def check(self, prefix: str) -> None:
        """List one object, without retries, within a few seconds."""
        try:
            self._once(_listing_of(prefix, 1, None), _listed, _CHECK_SECONDS)
        except UpstreamError as error:
            raise StoreUnavailableError(str(error)) from None

    def list_some(self, prefix: str, limit: int = PAGE) -> BucketPage:
        return self._page(prefix, limit, None)

    def list_all(self, prefix: str) -> Iterator[BucketPage]:
        """All objects with this key prefix, page by page."""
        page = self._page(prefix, PAGE, None)
        yield page
        while page.following:
            page = self._page(prefix, PAGE, page.following)
            yield page

    @contextmanager
    def signed_in(self) -> Iterator[None]:
        """Around work that needs credentials. ``UpstreamError``: renewing them failed, and may succeed later."""
        try:
            yield
        except UpstreamError:
            raise
        except (BdnError, TimeoutError) as error:
            raise StoreUnavailableError(f"cannot sign in to {self._where}: {error}") from error

    def close(self) -> None:
        self._closed.set()
        self._connections.close()
        self._check_connections.close()
        self.access.close()

    def _page(self, prefix: str, limit: int, token: str | None) -> BucketPage:
        page = self._ask(_listing_of(prefix, limit, token), _listed)
        if page is None:  # only a status in ``but`` gives None
            raise StoreUnavailableError(f"{self._where} cannot be listed")
        return page

    def _ask(self, request: _Request, read: Callable[[Answer], _Result]) -> _Result | None:
        """The result of ``read`` on success; None for a status in ``but``."""
        outage, began = Outage(self.patience), time.monotonic()
        while True:
            sent = time.monotonic()
            try:
                return self._once(request, read)
            except UpstreamError as error:
                failure = error
            is_last = request.until is not None and not isinstance(failure, UpstreamRateLimitedError)
            if is_last or self._closed.is_set():
                raise StoreUnavailableError(str(failure))
            delay = outage.delay(failure, time.monotonic() - sent, random.random())  # noqa: S311 - jitter
            if delay is None or time.monotonic() + delay > began + _BEGIN_SECONDS:
                raise StoreUnavailableError(str(failure)) from failure.__cause__
            self.pause(delay)

    def _once(
        self, request: _Request, read: Callable[[Answer], _Result], check_seconds: float | None = None
    ) -> _Result | None:
        """One attempt; a check if ``check_seconds`` limits its turn. Raises ``UpstreamError``: a retry may succeed."""
        connections = self._connections if check_seconds is None else self._check_connections
        with self.signed_in():
            url = self.access.address(request.method, request.key, request.query, request.headers)
        with self._turns.turn(len(request.content or b"") or request.expected, check_seconds, self.owner):
            # Signing, and waiting for a turn, take time.
            if request.until is not None and since_boot() > request.until:
                raise StoreUnavailableError(f"a {request.method} to {self._where} waited too long, and was not sent")
            cause = None
            try:
                with connections.request(request.method, url, dict(request.headers), request.content) as answer:
                    if answer.status in (200, 204):
                        cause = FailedOnItError()
                        return read(answer)
                    code = _code_in(answer.read(_SMALL))
                    if answer.status in request.but and code != "NoSuchBucket":
                        return None
                    is_busy = answer.status in (429, 503) or code in SLOW_DOWN
                    raise self._refused(answer, code) from (None if is_busy else FailedOnItError())
            except (*NETWORK_ERRORS, NotAListingError) as error:
                raise UpstreamUnavailableError(self._where, reason_of(error)) from cause

    def _refused(self, answer: Answer, code: str) -> BdnError:
        status, where = answer.status, self._where
        said = f"{where} answered {status} {code}".rstrip()
        wait = parse_retry_after(answer.headers)
        if code in SLOW_DOWN or status == 429:
            return UpstreamRateLimitedError(where, wait)
        if (
            code == "BadDigest" or status in (408, 409) or (status >= 500 and status != 501)
        ):  # BadDigest: the bytes changed on the way
            return UpstreamUnavailableError(where, f"it answered {status} {code}".rstrip(), wait)
        return StoreUnavailableError(f"{said}{_remedy(answer, code)}")


_CREDENTIALS: Final = "the credentials of the store (BDN_STORE_SECRET, or the keys in the environment)"


def _remedy(answer: Answer, code: str) -> str:
    """The operator's remedy for a refusal, after a colon."""
    if code in OTHER_REGION or 300 <= answer.status < 400:
        told = answer.headers.get("x-amz-bucket-region")
        return f": the bucket is in another region; set BDN_STORE_REGION{f'={told}' if told else ''}"
    if code == "NoSuchBucket":
        return ": create the bucket, or correct BDN_STORE or BDN_STORE_ENDPOINT"
    if code in BAD_CREDENTIALS:
        return f": {BAD_CREDENTIALS[code]}; check {_CREDENTIALS}"
    if answer.status in (401, 403):
        return f": {_CREDENTIALS} lack a permission; docs/operations.md lists what they need"
    return ""


def _drop(descriptor: int, release: Callable[[], object]) -> None:
    if descriptor >= 0:
        os.close(descriptor)
    release()


def _listing_of(prefix: str, limit: int, token: str | None) -> _Request:
    query = {"encoding-type": "url", "list-type": "2", "max-keys": str(limit), "prefix": prefix}
    return _Request("GET", "", query=query | ({"continuation-token": token} if token else {}))


def _heard(answer: Answer) -> bool:
    answer.read(_SMALL)  # otherwise the connection could not be reused
    return True


def _memory_file() -> int:
    """An anonymous file in memory, or in the temporary directory if a sandbox or ``vm.memfd_noexec=2`` refuses that."""
    try:
        return os.memfd_create("chunk")
    except OSError as error:
        if error.errno not in REFUSED:
            raise
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _fill(descriptor: int, answer: Answer) -> bool:
    """Read the body into a file in memory, with one copy."""
    if answer.length is None:
        raise ProtocolError("the answer does not state the object's size")
    size = min(answer.length, CHUNK_SIZE + 1)
    os.ftruncate(descriptor, 0)  # drop bytes of an earlier attempt
    os.ftruncate(descriptor, size)
    if size and answer.fill(memoryview(mmap.mmap(descriptor, size)), _STALL) < size:
        raise ConnectionResetError("the connection ended inside the answer")
    return True


def _listed(answer: Answer) -> BucketPage:
    return read_page(answer.read(_LISTING))


def _code_in(body: bytes) -> str:
    """The error code in a body, or an empty string. It appears in messages, so only safe characters are accepted."""
    found = _CODE.search(body)
    return found[1].decode() if found else ""
