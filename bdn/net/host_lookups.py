"""Host name resolution in dedicated threads: the machine's resolver may hang, and cannot be canceled.

``getaddrinfo`` blocks for as long as the name servers do (resolv.conf(5): 30 seconds and more). asyncio calls it in the
default executor, where a few hanging names would occupy every thread and delay the end of the program; a byte thread
would hang itself. Here a hanging name occupies one daemon thread, however many callers wait for it (ADR 0029).
"""

import asyncio
import socket
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from dataclasses import dataclass
from ipaddress import ip_address
from threading import Lock, Thread, current_thread
from typing import Any, Final, TypeVar

from bdn.net.descriptors import raise_descriptor_limit

_Result = TypeVar("_Result")


AddressInfo = tuple[int, int, int, str, Any]  # as returned by getaddrinfo; the last is the family's address
LONGEST_SECONDS: Final = 10.0  # a dead first name server costs 5, before the second is queried
QUESTIONS: Final = 64


class NameSilentError(socket.gaierror):
    """The resolver has not answered: a network failure that may pass."""

    def __init__(self, host: object, reason: str) -> None:
        super().__init__(socket.EAI_AGAIN, f"the name {host} does not resolve: {reason}")


@dataclass(frozen=True, slots=True)
class Question:
    host: str | None
    port: int | str | None
    family: int = 0
    kind: int = 0
    protocol: int = 0
    flags: int = 0

    @property
    def is_literal(self) -> bool:
        """Whether ``host`` is an address, which needs no resolver."""
        try:
            return self.host is None or bool(ip_address(self.host))
        except ValueError:
            return False

    def ask(self) -> list[AddressInfo]:
        """Call the resolver. Raises ``OSError``. Blocking, unless the host is literal."""
        try:
            return list(socket.getaddrinfo(self.host, self.port, self.family, self.kind, self.protocol, self.flags))
        except UnicodeError:
            raise socket.gaierror(socket.EAI_NONAME, f"{self.host} is not a host name") from None


class HostLookups:
    """Runs at most one look-up per question, in its own thread, however many callers wait; caches nothing.

    A waiter gives up after ``longest_seconds``; the look-up continues, and the next waiter joins it. At most ``limit``
    look-ups run; one more is refused at once.
    """

    def __init__(self, *, limit: int = QUESTIONS, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._limit = limit
        self._longest_seconds = longest_seconds
        self._running: dict[Question, Future[list[AddressInfo]]] = {}
        self._lock = Lock()

    def find(self, question: Question, seconds: float | None = None) -> list[AddressInfo]:
        """The addresses in the resolver's order, within at most ``seconds``. Blocking.

        Raises ``NameSilentError`` when the resolver has not answered, another ``OSError`` when there are no addresses.
        """
        if question.is_literal:
            return question.ask()
        longest = self._longest_seconds if seconds is None else min(seconds, self._longest_seconds)
        answer = self._asked(question)
        if not wait([answer], longest).done:
            raise NameSilentError(question.host, f"no answer within {longest:g} s")
        return answer.result()

    async def find_soon(self, question: Question) -> list[AddressInfo]:
        if question.is_literal:
            return question.ask()
        longest = self._longest_seconds
        try:
            async with asyncio.timeout(longest):
                return await asyncio.wrap_future(self._asked(question))
        except TimeoutError:
            raise NameSilentError(question.host, f"no answer within {longest:g} s") from None

    def _asked(self, question: Question) -> Future[list[AddressInfo]]:
        with self._lock:
            if question not in self._running:
                if len(self._running) >= self._limit:
                    raise NameSilentError(question.host, f"too many unanswered look-ups ({self._limit})")
                answer: Future[list[AddressInfo]] = Future()
                answer.set_running_or_notify_cancel()  # a canceled task cannot cancel it for others
                name = f"{current_thread().name} resolves {question.host}"
                Thread(target=self._run, args=(question, answer), name=name, daemon=True).start()
                self._running[question] = answer  # the thread needs the lock before it can end
            return self._running[question]

    def _run(self, question: Question, answer: Future[list[AddressInfo]]) -> None:
        found, failure = [], None
        try:
            found = question.ask()
        except Exception as error:  # noqa: BLE001 - the waiters raise it
            failure = error
        with self._lock:
            del self._running[question]
        if failure is None:
            answer.set_result(found)
        else:
            answer.set_exception(failure)


# One per process, like the resolver itself: a hanging look-up outlives its client, and the next client joins it.
HOST_LOOKUPS: Final = HostLookups()


class ServiceLoop(asyncio.SelectorEventLoop):
    """An event loop that resolves names here and not in asyncio's executor, for every library that runs on it."""

    async def getaddrinfo(  # type: ignore[override]
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002 - asyncio's name
        proto: int = 0,
        flags: int = 0,
    ) -> list[AddressInfo]:
        host = host.decode() if isinstance(host, bytes) else host
        port = port.decode() if isinstance(port, bytes) else port
        return await HOST_LOOKUPS.find_soon(Question(host, port, family, type, proto, flags))


def run_program(program: Coroutine[Any, Any, _Result]) -> _Result:
    """``asyncio.run`` on a ``ServiceLoop``, with the maximum of descriptors: the entry point of each program."""
    raise_descriptor_limit()
    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        return runner.run(program)
