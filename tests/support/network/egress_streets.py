"""Names that resolve as a test says, addresses that note who calls, and a list of every connection that was tried."""

import socket
from collections import deque
from typing import Any, Self

import pytest


class Names:
    """In the place of the machine's resolver, for this process; names that nobody told it do not exist."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self._answers: dict[str, deque[list[str]]] = {}
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._resolve)

    def say(self, name: str, *answers: list[str]) -> None:
        """The first question gets the first answer, and so on; the last one is for all that follow."""
        self._answers[name] = deque(answers)

    def _resolve(self, host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> Any:  # noqa: A002
        name = host.decode() if isinstance(host, bytes) else str(host)
        try:  # a literal in any spelling that the system takes
            return self._real(name, port, family, type, proto, socket.AI_NUMERICHOST)
        except socket.gaierror:
            self.asked.append(name)
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
