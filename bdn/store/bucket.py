"""One bucket, asked from byte threads: requests that are signed, retried and paced, and errors that say what to do.

The bytes of an object come into memory, in a file without a name: that can be read, hashed, and sent on like any other.
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
from bdn.store.access import Access, Dialect, Pairs
from bdn.store.boot_clock import since_boot
from bdn.wire.http_fields import parse_retry_after

_Result = TypeVar("_Result")
# For so long a request is made again. A reader who waits for it has somebody else to ask, and a copy is made again as a whole.
PATIENCE: Final = RetryPolicy(outage_seconds=20.0, attempts=4, longest_seconds=4.0, longest_retry_after_seconds=20.0)
AT_ONCE: Final = 32  # requests in flight, at most
OPEN_AT_ONCE: Final = 48  # chunks in memory that are sent to clients, of at most 8 MiB; half for one organisation
_OWN_AT_ONCE: Final = 8  # and those that the store and copies look at, which are closed soon
_OWN_SECONDS: Final = 30.0  # to wait until one of these is closed
_LISTING: Final = 8 * 1024 * 1024  # bytes of a page, at most
_SMALL: Final = 64 * 1024  # bytes of what else is said
_TIMEOUT_SECONDS: Final = 30.0
_CHECK_SECONDS: Final = 4.0  # before whoever asks whether the bucket answers has gone
_BEGIN_SECONDS: Final = 40.0  # no attempt is begun later: a bucket that hangs fails within two timeouts
_LONGEST_PAUSE_SECONDS: Final = (
    30.0  # that a server gets when it asks for more: one answer shall not close the store for an hour
)
_STALL: Final = StallPolicy()
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9.]{1,60})</Code>")


class FailedOnItError(Exception):
    """The cause of a ``StoreUnavailableError``: the server answered, and this request failed. Others may not."""


@dataclass(frozen=True, slots=True)
class _Request:
    """``content`` None is no body. ``but`` are refusals that are answers; ``expected`` are bytes that will come.

    With ``until``, by ``since_boot``, it is not sent later, and not again unless the server has refused it.
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
    """What was read of an object; ``release`` is called once, when it is closed."""

    def __init__(self, descriptor: int, release: Callable[[], object]) -> None:
        super().__init__(descriptor, "rb")
        self._release = release

    def close(self) -> None:
        """Give its memory back."""
        if not self.closed:
            super().close()
            self._release()


class Room:
    """Memory for ``count`` chunks, shared by organisation. Any thread."""

    def __init__(self, count: int) -> None:
        self._shares = Shares(count, spares=True)
        self._lock = threading.Lock()

    def acquire(self, organisation: str) -> Callable[[], None] | None:
        """What releases the memory of one chunk; None while the organisation is at its share."""
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
    """Requests in flight: as many as the server copes with, round robin over organisations; none while it asks to wait."""

    def __init__(self, where: str, most: int) -> None:
        self._where = where
        self._shares = Shares(0)
        self._pace = Pace(PaceRule(most, longest_pause_seconds=_LONGEST_PAUSE_SECONDS), time.monotonic())
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """Requests that are not sent yet."""
        return self._shares.waiting

    @contextmanager
    def turn(self, size: int, seconds: float | None = None, owner: str = "") -> Iterator[None]:
        """One request for ``owner``, which moves ``size`` bytes. Raises ``UpstreamRateLimitedError`` at once while the server asks to wait.

        ``UpstreamUnavailableError``: there was no turn in ``seconds``, where that is not None.
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
        """When the request may be sent: now."""
        if not self._changed.wait_for(lambda: place.is_granted, seconds):
            raise UpstreamUnavailableError(self._where, "the requests before this one are not answered")
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
    """Each method is one request, made again until it is answered, for a while. Blocking; safe for several threads.

    All raise ``StoreUnavailableError``, which holds no secret and no address with a signature.
    """

    uri: BucketUri
    access: Access
    patience: RetryPolicy = PATIENCE
    pause: Callable[[float], None] = time.sleep
    owner: str = ""  # the organisation whose requests these are; empty: the store itself
    _closed: threading.Event = field(default_factory=threading.Event, init=False)
    _connections: ConnectionPool = field(init=False)
    _check_connections: ConnectionPool = field(init=False)

    def __post_init__(self) -> None:
        self._where = str(self.uri)
        self._connections = ConnectionPool(timeout_seconds=_TIMEOUT_SECONDS)  # the operator's own: no egress rule
        self._check_connections = ConnectionPool(timeout_seconds=_CHECK_SECONDS, idle_limit=1)
        self._turns = Turns(self._where, AT_ONCE)
        self._room, self._own_room = Room(OPEN_AT_ONCE), threading.BoundedSemaphore(_OWN_AT_ONCE)

    @property
    def dialect(self) -> Dialect:
        """How the server is spoken to."""
        return self.access.dialect

    def put(self, key: str, content: bytes | Buffer, headers: Pairs = (), but: tuple[int, ...] = ()) -> bool:
        """Write the object. False: the answer was one of ``but``."""
        return self._ask(_Request("PUT", key, headers, content, but=but), _heard) is not None

    def head(self, key: str) -> Mapping[str, str] | None:
        """What is said of the object; None where there is none, and the bucket is there."""
        found = self._ask(_Request("HEAD", key, but=(404,)), lambda answer: answer.headers)
        if found is None:
            self.list_some(key, 1)  # an answer to HEAD does not say whether the bucket is gone
        return found

    def of(self, organisation: str) -> Self:
        """The same bucket, with connections, limits and memory in common, whose requests take their turns as this organisation's."""
        same = copy(self)
        same.owner = organisation
        return same

    @contextmanager
    def with_new_connections(self) -> Iterator[Self]:
        """The same bucket for some requests in a row: a server closes an idle connection whenever it likes, maybe under a request."""
        same = copy(self)
        same._connections = ConnectionPool(timeout_seconds=_TIMEOUT_SECONDS)  # noqa: SLF001 - its own
        try:
            yield same
        finally:
            same._connections.close()  # noqa: SLF001

    def get(self, key: str, *, for_reader: bool = False) -> BinaryIO | None:
        """All of the object, or as much as shows that it is longer than a chunk; None where there is none.

        Waits while too many are open. ``for_reader``: the organisation reads it, and at its share this fails at once: so many
        threads that wait for each other would close none.
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
        """Memory for one chunk; returns what releases it. Raises ``StoreUnavailableError``."""
        if for_reader:
            release = self._room.acquire(self.owner)
            if release is None:
                raise StoreUnavailableError(f"too many chunks of {self._where} are being sent; try again")
            return release
        if not self._own_room.acquire(timeout=_OWN_SECONDS):
            raise StoreUnavailableError(f"{_OWN_AT_ONCE} chunks of {self._where} are being read; try again")
        return self._own_room.release

    def delete(self, key: str) -> None:
        """Remove the object, if it is there, asking as often as it takes: only for what nobody puts again under this name."""
        self._ask(_Request("DELETE", key, but=(404,)), _heard)

    def delete_once(self, key: str, until: float) -> None:
        """Remove the object, if it is there; no request is sent after ``until``, by ``since_boot``.

        ``StoreUnavailableError``: nobody knows whether it was, or will be, removed.
        """
        self._ask(_Request("DELETE", key, but=(404,), until=until), _heard)

    def check(self, prefix: str) -> None:
        """List one object, once, in a few seconds."""
        try:
            self._once(_listing_of(prefix, 1, None), _listed, _CHECK_SECONDS)
        except UpstreamError as error:
            raise StoreUnavailableError(str(error)) from None

    def list_some(self, prefix: str, limit: int = PAGE) -> BucketPage:
        """The first objects whose keys begin so."""
        return self._page(prefix, limit, None)

    def list_all(self, prefix: str) -> Iterator[BucketPage]:
        """All of them, page by page."""
        page = self._page(prefix, PAGE, None)
        yield page
        while page.following:
            page = self._page(prefix, PAGE, page.following)
            yield page

    @contextmanager
    def signed_in(self) -> Iterator[None]:
        """Around what needs credentials. ``UpstreamError``: they could not be renewed, and may be later."""
        try:
            yield
        except UpstreamError:
            raise
        except (BdnError, TimeoutError) as error:
            raise StoreUnavailableError(f"{self._where} cannot be signed in to: {error}") from error

    def close(self) -> None:
        """Let go of connections; who waits for an answer fails now."""
        self._closed.set()
        self._connections.close()
        self._check_connections.close()
        self.access.close()

    def _page(self, prefix: str, limit: int, token: str | None) -> BucketPage:
        page = self._ask(_listing_of(prefix, limit, token), _listed)
        if page is None:  # only what a request is ready for
            raise StoreUnavailableError(f"{self._where} cannot be listed")
        return page

    def _ask(self, request: _Request, read: Callable[[Answer], _Result]) -> _Result | None:
        """What was read of a good answer, or None for the other answer that the request is ready for."""
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
        """``check_seconds`` bound its turn, and it is a check then. Raises ``UpstreamError``: another request may succeed."""
        connections = self._connections if check_seconds is None else self._check_connections
        with self.signed_in():
            url = self.access.address(request.method, request.key, request.query, request.headers)
        with self._turns.turn(len(request.content or b"") or request.expected, check_seconds, self.owner):
            # Signing and waiting for a turn take their time.
            if request.until is not None and since_boot() > request.until:
                raise StoreUnavailableError(f"a {request.method} to {self._where} was held up, and was not sent")
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
        """Our error for an answer that nobody is ready for."""
        status, where = answer.status, self._where
        said = f"{where} answered {status} {code}".rstrip()
        wait = parse_retry_after(answer.headers)
        if code in SLOW_DOWN or status == 429:
            return UpstreamRateLimitedError(where, wait)
        if (
            code == "BadDigest" or status in (408, 409) or (status >= 500 and status != 501)
        ):  # the bytes changed on their way
            return UpstreamUnavailableError(where, f"it answered {status} {code}".rstrip(), wait)
        return StoreUnavailableError(f"{said}{_remedy(answer, code)}")


_CREDENTIALS: Final = "the credentials of the store (BDN_STORE_SECRET, or those of the environment)"


def _remedy(answer: Answer, code: str) -> str:
    """What the operator should do about a refusal, after a colon."""
    if code in OTHER_REGION or 300 <= answer.status < 400:
        told = answer.headers.get("x-amz-bucket-region")
        return f": it lies in another region; set BDN_STORE_REGION{f'={told}' if told else ''}"
    if code == "NoSuchBucket":
        return ": make the bucket, or correct BDN_STORE or BDN_STORE_ENDPOINT"
    if code in BAD_CREDENTIALS:
        return f": {BAD_CREDENTIALS[code]}; look at {_CREDENTIALS}"
    if answer.status in (401, 403):
        return f": {_CREDENTIALS} may not do that there; docs/operations.md has what they need"
    return ""


def _drop(descriptor: int, release: Callable[[], object]) -> None:
    if descriptor >= 0:
        os.close(descriptor)
    release()


def _listing_of(prefix: str, limit: int, token: str | None) -> _Request:
    query = {"encoding-type": "url", "list-type": "2", "max-keys": str(limit), "prefix": prefix}
    return _Request("GET", "", query=query | ({"continuation-token": token} if token else {}))


def _heard(answer: Answer) -> bool:
    answer.read(_SMALL)  # or the connection could not be used again
    return True


def _memory_file() -> int:
    """A file without a name, in memory. Where a sandbox refuses that, such as the kernel with ``vm.memfd_noexec=2``, in the temporary directory."""
    try:
        return os.memfd_create("chunk")
    except OSError as error:
        if error.errno not in REFUSED:
            raise
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _fill(descriptor: int, answer: Answer) -> bool:
    """The body into a file in memory, in one copy."""
    if answer.length is None:
        raise ProtocolError("the answer does not tell the size of the object")
    size = min(answer.length, CHUNK_SIZE + 1)
    os.ftruncate(descriptor, 0)  # of an earlier attempt
    os.ftruncate(descriptor, size)
    if size and answer.fill(memoryview(mmap.mmap(descriptor, size)), _STALL) < size:
        raise ConnectionResetError("the connection ended inside the answer")
    return True


def _listed(answer: Answer) -> BucketPage:
    return read_page(answer.read(_LISTING))


def _code_in(body: bytes) -> str:
    """The server's word for a refusal, or nothing. It stands in messages, and a server may say anything."""
    found = _CODE.search(body)
    return found[1].decode() if found else ""
