"""Host names are resolved in threads of their own: the machine's resolver may not answer, and cannot be stopped.

``getaddrinfo`` blocks for as long as the name servers like (resolv.conf(5): 30 seconds and more). Asyncio calls it in the default
executor, where a few names that hang would hold every thread that other work waits for, and delay the end of the program; a byte
thread would be held itself. Here a name that hangs holds one daemon thread, whoever asks for it and how often (ADR 0029).
"""

import asyncio
import socket
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from threading import Lock, Thread, current_thread
from typing import Any, Final, TypeVar

from bdn.net.descriptors import raise_descriptor_limit

_Result = TypeVar("_Result")


AddressInfo = tuple[int, int, int, str, Any]  # as of getaddrinfo; the last one is the address as its family has it
LONGEST_SECONDS: Final = 10.0  # a first name server that is dead costs 5, before the second is asked
QUESTIONS: Final = 64


class NameSilentError(socket.gaierror):
    """The resolver has not answered: a failure of the network that may pass."""

    def __init__(self, host: object, reason: str) -> None:
        super().__init__(socket.EAI_AGAIN, f"the name {host} does not resolve: {reason}")


@dataclass(frozen=True, slots=True)
class Question:
    """What ``getaddrinfo`` is asked."""

    host: str | None
    port: int | str | None
    family: int = 0
    kind: int = 0
    protocol: int = 0
    flags: int = 0

    @property
    def is_literal(self) -> bool:
        """Whether it is an address, which needs no resolver."""
        try:
            return self.host is None or bool(ip_address(self.host))
        except ValueError:
            return False

    def ask(self) -> list[AddressInfo]:
        """The machine's answer; ``OSError`` when there is none. Blocking, unless the host is literal."""
        try:
            return list(socket.getaddrinfo(self.host, self.port, self.family, self.kind, self.protocol, self.flags))
        except UnicodeError:
            raise socket.gaierror(socket.EAI_NONAME, f"{self.host} cannot be a name") from None


class HostLookups:
    """Asks each question once at a time, in one thread, however many wait for the answer; nothing is cached.

    A waiter gives up after ``longest_seconds``; the question goes on, and the next waiter joins it. At most ``limit`` are under
    way; one more is refused at once.
    """

    def __init__(self, *, limit: int = QUESTIONS, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._limit = limit
        self._longest_seconds = longest_seconds
        self._waiting: dict[Question, set[Future[list[AddressInfo]]]] = {}
        self._lock = Lock()

    def find(self, question: Question, seconds: float | None = None) -> list[AddressInfo]:
        """The addresses, in the resolver's order, within ``seconds`` where those are less. Blocking.

        ``NameSilentError`` when nobody knows yet, another ``OSError`` when there are none.
        """
        if question.is_literal:
            return question.ask()
        longest = self._longest_seconds if seconds is None else min(seconds, self._longest_seconds)
        with self._asked(question) as answer:
            if not wait([answer], longest).done:
                raise NameSilentError(question.host, f"no answer within {longest:g} s")
            return answer.result()

    async def find_soon(self, question: Question) -> list[AddressInfo]:
        """The same for an event loop."""
        if question.is_literal:
            return question.ask()
        longest = self._longest_seconds
        with self._asked(question) as answer:
            try:
                async with asyncio.timeout(longest):
                    return await asyncio.wrap_future(answer)
            except TimeoutError:
                raise NameSilentError(question.host, f"no answer within {longest:g} s") from None

    @contextmanager
    def _asked(self, question: Question) -> Iterator[Future[list[AddressInfo]]]:
        """The answer to come, for one waiter."""
        answer: Future[list[AddressInfo]] = Future()
        answer.set_running_or_notify_cancel()  # a task that is canceled cannot cancel it under the thread that answers
        with self._lock:
            if question not in self._waiting:
                self._begin(question)
            waiting = self._waiting[question]
            waiting.add(answer)
        try:
            yield answer
        finally:
            with self._lock:
                waiting.discard(answer)

    def _begin(self, question: Question) -> None:
        """The caller holds the lock, which the thread needs before it can end."""
        if len(self._waiting) >= self._limit:
            raise NameSilentError(question.host, f"as many as {self._limit} have no answer yet")
        name = f"{current_thread().name} resolves {question.host}"
        Thread(target=self._run, args=(question,), name=name, daemon=True).start()
        self._waiting[question] = set()

    def _run(self, question: Question) -> None:
        found, failure = [], None
        try:
            found = question.ask()
        except Exception as error:  # noqa: BLE001 - it is those who wait who raise it
            failure = error
        with self._lock:
            waiting = tuple(self._waiting.pop(question))
        for answer in waiting:
            if failure is None:
                answer.set_result(found)
            else:
                answer.set_exception(failure)


# One in a process, like the resolver itself: a question that hangs outlives the client that asked it, and the next client asks again.
HOST_LOOKUPS: Final = HostLookups()


class ServiceLoop(asyncio.SelectorEventLoop):
    """The event loop of our programs, which resolves names here and not in asyncio's executor: for every library that runs on it."""

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
        """As of asyncio, with the errors of ``HostLookups.find``."""
        host = host.decode() if isinstance(host, bytes) else host
        port = port.decode() if isinstance(port, bytes) else port
        return await HOST_LOOKUPS.find_soon(Question(host, port, family, type, proto, flags))


def run_program(program: Coroutine[Any, Any, _Result]) -> _Result:
    """``asyncio.run`` on such a loop, with as many descriptors as this process may have: each program begins here."""
    raise_descriptor_limit()
    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        return runner.run(program)
