"""Names that resolve as a test says, addresses that note who calls, and a list of every connection that was tried."""

import socket
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import cycle
from threading import Event, Lock
from typing import Any, Final, Self

import pytest

# What name servers say of a name that does not exist, and when they cannot be asked.
_FAILURES: Final = (
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
)


class Names:
    """In the place of the machine's resolver, for this process; names that nobody told it do not exist.

    The next ``lost`` questions find no address. A question for one of ``silent`` gets no answer before ``speak``, and holds
    its thread until then.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, at_loopback: Iterable[str] = (), silent: Sequence[str] = ()
    ) -> None:
        self.asked: list[str] = []
        self.lost = 0
        self._answers = {name: deque([["127.0.0.1"]]) for name in at_loopback}
        self._silent = silent
        self._speaks = Event()
        self._failures = cycle(_FAILURES)
        self._lock = Lock()
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._resolve)

    def say(self, name: str, *answers: list[str]) -> None:
        """The first question gets the first answer, and so on; the last one is for all that follow."""
        self._answers[name] = deque(answers)

    def speak(self) -> None:
        """Answer all who wait, and whoever asks from now on."""
        self._speaks.set()

    def _resolve(self, host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> Any:  # noqa: A002
        name = host.decode() if isinstance(host, bytes) else host
        try:  # a literal in any spelling that the system takes
            return self._real(name, port, family, type, proto, flags | socket.AI_NUMERICHOST)
        except socket.gaierror:
            self.asked.append(name)
        if name in self._silent:
            self._speaks.wait()
        with self._lock:
            if self.lost:
                self.lost -= 1
                raise next(self._failures)
        answers = self._answers.get(name)
        if answers is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        addresses = answers.popleft() if len(answers) > 1 else answers[0]
        return [
            info
            for address in addresses
            for info in self._real(address, port, 0, type or socket.SOCK_STREAM, proto, socket.AI_NUMERICHOST)
        ]


class Doorbell:
    """An address where something listens and nobody answers."""

    def __init__(self, host: str, port: int = 0) -> None:
        self._listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=16
        )
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self.url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    @property
    def rang(self) -> bool:
        """Whether a connection has arrived since the last look. The kernel keeps it until then."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return False
        connection.close()
        return True


def note_attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The host of every TCP connection that this process tries to make from now on."""
    tried: list[str] = []
    connect = socket.socket.connect

    def noting(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            tried.append(str(address[0]))
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", noting)
    return tried
