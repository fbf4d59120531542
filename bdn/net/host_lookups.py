"""Addresses of names, asked in threads of their own: the machine's resolver may not answer, and cannot be told to stop.

``getaddrinfo`` blocks for as long as the name servers like (resolv.conf(5): 30 seconds and more), and nothing interrupts it.
Asyncio asks it in the default executor, where a few attempts hold every thread that all other work waits for, and where
the end of the program waits for it, too. A byte thread would be held itself. So a name that hangs holds one thread here, whoever
asks and how often, and all others go on; daemon threads, because the end of the program need not wait.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from threading import Lock, Thread, current_thread
from typing import Any, Final

AddressInfo = tuple[int, int, int, str, Any]  # as of getaddrinfo; the last one is the address as its family has it
LONGEST_SECONDS: Final = 10.0  # a first name server that is dead costs 5, before the second is asked
QUESTIONS: Final = 64


class NameSilentError(socket.gaierror):
    """No answer yet, neither yes nor no: a failure of the network that may pass."""

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
        """Whether nobody needs to be asked."""
        try:
            return self.host is None or bool(ip_address(self.host))
        except ValueError:
            return False

    def ask(self) -> list[AddressInfo]:
        """The machine's answer. Blocking, unless the host is literal.

        Raises:
            OSError: there is none.
        """
        try:
            return list(socket.getaddrinfo(self.host, self.port, self.family, self.kind, self.protocol, self.flags))
        except UnicodeError:
            raise socket.gaierror(socket.EAI_NONAME, f"{self.host} cannot be a name") from None


class HostLookups:
    """Asks one question once at a time, in one thread, however many wait for the answer; nothing is kept of an answer.

    Who waits longer than ``longest_seconds`` gives up; the question goes on, and who asks again waits for that one. At most
    ``limit`` are under way; one more is refused at once, like a name server that has too much to do.
    """

    def __init__(self, *, limit: int = QUESTIONS, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._limit = limit
        self._longest_seconds = longest_seconds
        self._waiting: dict[Question, set[Future[list[AddressInfo]]]] = {}
        self._lock = Lock()

    def find(self, question: Question, seconds: float | None = None) -> list[AddressInfo]:
        """The addresses, in the resolver's order, within ``seconds`` where those are less. Blocking.

        Raises:
            NameSilentError: nobody knows yet.
            OSError: there are none.
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
        """The answer to come, for one who waits; who leaves leaves nothing behind."""
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
        """With the lock, which the thread needs before it can end."""
        if len(self._waiting) >= self._limit:
            raise NameSilentError(question.host, f"as many as {self._limit} have no answer yet")
        name = f"{current_thread().name} seeks {question.host}"
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
