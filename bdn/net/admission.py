"""Which connections of a server may stay when there are too many: strangers share by address, authorised clients by organisation."""

import threading
from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_address, ip_network
from typing import Final, Generic, TypeVar

from bdn.core.errors import StoreUnavailableError

_Client = TypeVar("_Client")
_LEAST_STRANGERS: Final = 16  # of one address


class Admission(Generic[_Client]):
    """Connections in the order in which they came, ``limit`` at most. Any thread.

    A stranger has had no request authorised. One address has a quarter of all places for strangers, and one organisation has
    three quarters of all places. ``end_idle`` closes the first of some clients that is idle, and returns whether one was.
    """

    def __init__(self, limit: int, end_idle: Callable[[Iterable[_Client]], bool]) -> None:
        self._limit = limit
        self._end_idle = end_idle
        self._most_strangers = max(_LEAST_STRANGERS, limit // 4)
        self._most_of_one = limit - limit // 4
        self._strangers: dict[_Client, str] = {}
        self._of_address: dict[str, dict[_Client, None]] = {}
        self._members: dict[_Client, str] = {}
        self._of_organisation: dict[str, dict[_Client, None]] = {}
        self._lock = threading.Lock()

    def clients(self) -> list[_Client]:
        """All of them, strangers first."""
        with self._lock:
            return [*self._strangers, *self._members]

    def admit(self, client: _Client, address: str) -> bool:
        """Hold a place for a stranger from ``address``. Returns False at the limit, when no connection in its way is idle."""
        others = self._in_the_way(address)
        if others is not None and not self._end_idle(others):
            return False
        with self._lock:
            self._strangers[client] = address
            self._of_address.setdefault(address, {})[client] = None
        return True

    def know(self, client: _Client, organisation: str) -> None:
        """A request of the client was authorised. No effect on a client that has left.

        Raises ``StoreUnavailableError``: the organisation is at its limit, and none of its connections is idle.
        """
        with self._lock:
            if client not in self._strangers and client not in self._members:
                return
            self._leave(client)
            self._members[client] = organisation
            others = self._of_organisation.setdefault(organisation, {})
            others[client] = None
            in_the_way = tuple(others) if len(others) > self._most_of_one else None
        if in_the_way is not None and not self._end_idle(in_the_way):
            raise StoreUnavailableError("this organisation has too many connections at work; try again")

    def leave(self, client: _Client) -> None:
        """The connection has ended. No effect on a client that was not admitted."""
        with self._lock:
            self._leave(client)

    def _in_the_way(self, address: str) -> Sequence[_Client] | None:
        with self._lock:
            others = self._of_address.get(address, ())
            if len(others) >= self._most_strangers:
                return tuple(others)
            if len(self._strangers) + len(self._members) < self._limit:
                return None
            return (*self._strangers, *max(self._of_organisation.values(), key=len, default=()))

    def _leave(self, client: _Client) -> None:
        for groups, owners in ((self._of_address, self._strangers), (self._of_organisation, self._members)):
            name = owners.pop(client, None)
            if name is not None:
                del groups[name][client]
                if not groups[name]:
                    del groups[name]


def network_of(address: str) -> str:
    """The address, or of IPv6 the 64 bits that a provider gives to one customer."""
    known = ip_address(address.partition("%")[0])
    if known.version == 4:
        return str(known)
    return str(known.ipv4_mapped or ip_network((int(known), 64), strict=False))
