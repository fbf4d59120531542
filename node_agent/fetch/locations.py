"""Signed addresses of chunks in the mirror's bucket: requested ahead, and held in memory only."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import BdnError, CanceledError, NotFoundError
from bdn.core.source.upstream import Location
from bdn.net.api_clients import MirrorClient
from bdn.wire.http_fields import is_in_the_clear
from bdn.wire.location_schema import Locations
from node_agent.fetch.reads_in_progress import ReadsInProgress

logger = logging.getLogger(__name__)
_AT_ONCE: Final = 500  # chunks, 4 GB: at 1 GB/s one request every four seconds
_KEPT: Final = 8000  # addresses, some 8 MB; with a session token in each twice as much
_USED_SHARE: Final = 0.9  # of an address's lifetime: a request sent just before the end would arrive after it
_ANSWER_SECONDS: Final = 10.0  # for the mirror
_LOOK_SECONDS: Final = 0.1  # the longest delay until a waiting thread notices ``stop``
_WAIT_SECONDS: Final = 60.0  # for another thread's request, before checking again
_PROXY_SECONDS: Final = 60.0  # pause of requests to a mirror that delivers through its data plane
_FAILED_SECONDS: Final = 2.0  # pause of requests after a failure

# Requests addresses of a manifest's chunks from the mirror, with a grant. Blocks until the event is set. Raises
# ``BdnError``.
Ask = Callable[[Digest, Sequence[Digest], str, threading.Event], Locations]


def asking(client: MirrorClient, loop: asyncio.AbstractEventLoop) -> Ask:
    """Lets byte threads call the mirror's API on ``loop``."""

    def ask(manifest: Digest, digests: Sequence[Digest], bearer: str, stop: threading.Event) -> Locations:
        async def question() -> Locations:
            return await client.within(_ANSWER_SECONDS, client.locate(manifest, digests, bearer))

        answer = asyncio.run_coroutine_threadsafe(question(), loop)
        while not answer.done():
            wait_for([answer], _LOOK_SECONDS)
            if stop.is_set():
                answer.cancel()
                raise CanceledError("the transfer")
        return answer.result()

    return ask


@dataclass(frozen=True)
class Reading:
    """A read of ``manifest`` with the grant ``bearer``. ``ahead`` are its next chunks, each once."""

    manifest: Digest
    bearer: str = field(repr=False)
    ahead: Iterator[Digest] = field(default_factory=lambda: iter(()), repr=False)

    _unanswered: list[Digest] = field(default_factory=list, init=False, repr=False)

    def coming(self) -> Iterator[Digest]:
        """The next chunks. Consumed as they are iterated."""
        return chain((self._unanswered.pop(0) for _ in range(len(self._unanswered))), self.ahead)

    def put_back(self, digests: Sequence[Digest]) -> None:
        self._unanswered[:0] = digests

    @property
    def right(self) -> "_Right":
        return self.manifest, self.bearer


_Right = tuple[Digest, str]  # a manifest and a grant for it
_Key = tuple[Digest, str, Digest]  # and a chunk


@dataclass(frozen=True, slots=True)
class _Located:
    location: Location
    until: float


class LocationLookup:
    """Addresses for all readers. Thread-safe. A request for a missing one includes the chunks that come next.

    The mirror states how long an address is valid; ``clock`` counts that time from before the request, since clocks
    differ.

    With ``requires_tls`` no plain-HTTP address is used; chunks then come through the mirror's data plane.
    """

    def __init__(self, ask: Ask, clock: Callable[[], float], *, requires_tls: bool = False) -> None:
        self._ask = ask
        self._clock = clock
        self._requires_tls = requires_tls
        self._has_warned = False  # about a plain-HTTP address
        self._known: dict[_Key, _Located] = {}  # in order of arrival, the newest last
        self._wanted: dict[_Right, set[Digest]] = {}  # chunks that threads wait for
        self._asking = ReadsInProgress()
        self._silent_until = float("-inf")  # no request to the mirror before this time
        self._lock = threading.Lock()

    def of(self, reading: Reading, chunk: Digest, stop: threading.Event) -> Location | None:
        """Where the chunk can be read now. None if the mirror gives no address: use the data plane."""
        if (found := self._good(reading, chunk)) is not None:
            return found
        with self._lock:
            self._wanted.setdefault(reading.right, set()).add(chunk)
        try:
            return self._asked(reading, chunk, stop)
        finally:
            with self._lock:
                wanted = self._wanted.get(reading.right, set())
                wanted.discard(chunk)
                if not wanted:
                    self._wanted.pop(reading.right, None)

    def forget(self, reading: Reading, chunk: Digest, location: Location) -> None:
        """Drop an address that was used or refused."""
        key = *reading.right, chunk
        with self._lock:
            if key in self._known and self._known[key].location is location:
                del self._known[key]

    def _good(self, reading: Reading, chunk: Digest) -> Location | None:
        with self._lock:
            found = self._known.get((*reading.right, chunk))
            return found.location if found is not None and self._clock() < found.until else None

    def _asked(self, reading: Reading, chunk: Digest, stop: threading.Event) -> Location | None:
        """One request at a time per right; waiting callers join the next, or find their address in the running one."""
        while not stop.is_set() and self._clock() >= self._silent_until:
            with self._asking.lead(reading.right) as is_leader:
                if is_leader:
                    if (found := self._good(reading, chunk)) is None:
                        self._take_up(reading, chunk, stop)
                        found = self._good(reading, chunk)
                    return found
            self._asking.wait(reading.right, _WAIT_SECONDS, stop)
            if (found := self._good(reading, chunk)) is not None:
                return found
        return None

    def _take_up(self, reading: Reading, chunk: Digest, stop: threading.Event) -> None:
        digests, asked = self._next(reading, chunk), self._clock()
        try:
            try:
                answer = self._ask(reading.manifest, digests, reading.bearer, stop)
            except BdnError as error:
                if error.code != NotFoundError.code or len(digests) == 1:
                    raise
                answer = self._ask(reading.manifest, [chunk], reading.bearer, stop)  # another chunk may not be ours
        except BdnError as error:  # if the data plane fails as well, its error gives the reason
            if error.transient:
                reading.put_back(digests[1:])
                self._silent_until = self._clock() + _FAILED_SECONDS
            return
        items = [one for one in answer.items if not (self._requires_tls and is_in_the_clear(one.url))]
        if is_refused := len(items) < len(answer.items):
            self._warn()
        if answer.delivery == "proxy" or is_refused:
            self._silent_until = self._clock() + _PROXY_SECONDS
        with self._lock:
            for item in items:
                key = *reading.right, Digest.parse(item.digest)
                self._known.pop(key, None)
                location = Location(item.url, tuple(item.headers.items()))
                self._known[key] = _Located(location, asked + _USED_SHARE * item.expires_in_seconds)
            while len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]

    def _warn(self) -> None:
        with self._lock:
            has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            logger.warning(
                "not reading from the mirror's bucket: its addresses are plain HTTP, and BDN_AGENT_TLS=require here. Chunks come "
                "through the mirror; set its BDN_STORE_ENDPOINT to an https:// address"
            )

    def _next(self, reading: Reading, chunk: Digest) -> list[Digest]:
        """The chunks of the next request, at most ``_AT_ONCE`` unless more are waited for."""
        with self._lock:
            others = self._wanted[reading.right] - {chunk}
        wanted = [chunk, *(one for one in others if self._good(reading, one) is None)]
        ahead = (one for one in reading.coming() if one not in wanted and self._good(reading, one) is None)
        return wanted + list(islice(ahead, max(0, _AT_ONCE - len(wanted))))
