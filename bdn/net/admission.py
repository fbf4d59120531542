"""Admission of connections at a server's limit: strangers share by address, authorised clients by organisation."""

import threading
from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_address, ip_network
from typing import Final, Generic, TypeVar

from bdn.core.errors import StoreUnavailableError

_Client = TypeVar("_Client")
_LEAST_STRANGERS: Final = 16  # per address


class Admission(Generic[_Client]):
    """At most ``limit`` connections, in order of arrival. Thread-safe.

    A stranger has no authorised request yet. An address gets a quarter of all places for strangers, an organisation
    three quarters of all places. ``end_idle`` closes the first idle one of some clients, and returns whether one was
    idle.
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
        with self._lock:
            return [*self._strangers, *self._members]

    def admit(self, client: _Client, address: str) -> bool:
        """Hold a place for a stranger from ``address``.

        Returns False at the limit, when no connection in its way is idle.
        """
        others = self._in_the_way(address)
        if others is not None and not self._end_idle(others):
            return False
        with self._lock:
            self._strangers[client] = address
            self._of_address.setdefault(address, {})[client] = None
        return True

    def know(self, client: _Client, organisation: str) -> None:
        """Record the authorisation of a client. No effect after ``leave``.

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
        """Release the place. No effect on a client that was not admitted."""
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
    """The IPv4 address, or the IPv6 /64 that a provider assigns to one customer."""
    known = ip_address(address.partition("%")[0])
    if known.version == 4:
        return str(known)
    return str(known.ipv4_mapped or ip_network((int(known), 64), strict=False))
