"""Which connections of the data plane may stay when there are too many: strangers share by address, authorised clients by organisation."""

import threading
from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from typing import Final, Generic, TypeVar

_Client = TypeVar("_Client")
_LEAST_STRANGERS: Final = 16  # of one address


class Admission(Generic[_Client]):
    """Connections in the order in which they came, ``limit`` at most. Any thread.

    A stranger has had no request authorised. One address has a quarter of all places for strangers, and one organisation has
    three quarters of all places.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._most_strangers = max(_LEAST_STRANGERS, limit // 4)
        self._most_of_one = limit - limit // 4
        self._strangers: dict[_Client, str] = {}
        self._of_address: dict[str, dict[_Client, None]] = {}
        self._members: dict[_Client, str] = {}
        self._of_organisation: dict[str, dict[_Client, None]] = {}
        self._lock = threading.Lock()

    def in_the_way(self, address: str) -> Sequence[_Client] | None:
        """Connections of which the first idle one is closed before a client from ``address`` is admitted; None: there is room."""
        with self._lock:
            others = self._of_address.get(_network(address), ())
            if len(others) >= self._most_strangers:
                return tuple(others)
            if len(self._strangers) + len(self._members) < self._limit:
                return None
            return (*self._strangers, *max(self._of_organisation.values(), key=len, default=()))

    def admit(self, client: _Client, address: str) -> None:
        """Count the connection as a stranger."""
        network = _network(address)
        with self._lock:
            self._strangers[client] = network
            self._of_address.setdefault(network, {})[client] = None

    def know(self, client: _Client, organisation: str) -> Sequence[_Client] | None:
        """A request of the client was authorised. Returns connections of which one, or else the client, is closed; None: there is room."""
        with self._lock:
            self._leave(client)
            self._members[client] = organisation
            others = self._of_organisation.setdefault(organisation, {})
            others[client] = None
            return tuple(others) if len(others) > self._most_of_one else None

    def leave(self, client: _Client) -> None:
        """Remove a connection that has ended; does nothing for an unknown one."""
        with self._lock:
            self._leave(client)

    def _leave(self, client: _Client) -> None:
        for groups, owners in ((self._of_address, self._strangers), (self._of_organisation, self._members)):
            name = owners.pop(client, None)
            if name is not None:
                del groups[name][client]
                if not groups[name]:
                    del groups[name]


def _network(address: str) -> str:
    """The address, or of IPv6 the 64 bits that a provider gives to one customer."""
    known = ip_address(address.partition("%")[0])
    if known.version == 4:
        return str(known)
    return str(known.ipv4_mapped or ip_network((int(known), 64), strict=False))
