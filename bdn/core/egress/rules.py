"""Where the mirror may connect: to the public internet, and to what the operator lists in ``BDN_EGRESS_ALLOW``.

A door asks twice: for the host as it is written, before anything else, and for every address that it resolves to. It then
connects to one of the addresses that were checked and does not resolve again, because a second answer may be another one
(DNS rebinding). Behind a proxy the first question is the only one: the proxy resolves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Final, Self

from bdn.core.egress.special_addresses import Address, Network, plain, special_kind
from bdn.core.egress.written_hosts import UnreadableHostError, WrittenHost, read_host
from bdn.core.errors import EgressRefusedError

# Names that stand for an address on the machines that know them, whatever a resolver says (RFC 6761; the clouds' own pages).
_LOOPBACK_NAMES: Final = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})
_METADATA_NAMES: Final = frozenset(
    {"metadata", "metadata.google.internal", "instance-data", "instance-data.ec2.internal"}
)
_LOOPBACK: Final = (ip_address("127.0.0.1"), ip_address("::1"))
_METADATA: Final = (ip_address("169.254.169.254"),)


class EgressEntryError(ValueError):
    """An entry of ``BDN_EGRESS_ALLOW`` that names nothing; the message says which one and what to write."""


@dataclass(frozen=True, slots=True)
class EgressPolicy:
    """What the operator allows beyond the public internet. A name admits whatever it resolves to, an address only itself."""

    names: frozenset[str] = frozenset()
    suffixes: tuple[str, ...] = ()  # with their first dot; they admit the names below, not the suffix itself
    networks: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read entries with commas or white space between them: names, ``*.suffix``, addresses, networks (CIDR).

        Raises:
            EgressEntryError: an entry cannot be read.
        """
        names: set[str] = set()
        suffixes: dict[str, None] = {}
        networks: dict[Network, None] = {}
        for entry in text.replace(",", " ").split():
            if "/" in entry:
                networks[_network(entry)] = None
                continue
            host = _entry_host(entry, entry.removeprefix("*."))
            if host.readings and not entry.startswith("*"):
                networks[_address(entry, host)] = None
            elif host.readings:
                raise EgressEntryError(
                    f"{entry!r} puts a wildcard before an address; write a network, such as 10.0.0.0/8"
                )
            elif entry.startswith("*."):
                suffixes[f".{host.name}"] = None
            else:
                names.add(host.name)
        return cls(frozenset(names), tuple(suffixes), tuple(networks))

    def admit(self, host: str) -> str:
        """Check a host as it is written; returns the name or address to resolve, which is the one that was read here.

        Raises:
            EgressRefusedError: it is, or surely stands for, a special address, or cannot be read.
        """
        read = _read(host)
        if self._names(read):
            return read.name
        kinds = [self._refusal(address) for address in read.readings or _addresses_of(read.name)]
        # A spelling is as bad as its worst reading; a name that stands for two addresses is as good as its better one.
        kind = next(filter(None, kinds), None)
        if kind and (read.readings or all(kinds)):
            raise EgressRefusedError(read.name, f"it is {kind}")
        return read.name

    def admit_resolved(self, host: str, addresses: Iterable[str]) -> None:
        """Check all that a host resolves to. One refused address refuses the host: its owner could not mean both.

        Which address it was stays out of the error: answers of the operator's own name servers are not for users.

        Raises:
            EgressRefusedError: one of the addresses is special and not allowed.
        """
        read = _read(host)
        if self._names(read):
            return
        for text in addresses:
            if kind := self._refusal(ip_address(text.partition("%")[0])):
                raise EgressRefusedError(read.name, f"it is {kind}" if read.readings else f"it resolves to {kind}")

    def _names(self, host: WrittenHost) -> bool:
        return not host.readings and (host.name in self.names or host.name.endswith(self.suffixes))

    def _refusal(self, address: Address) -> str | None:
        kind = special_kind(address)
        address = plain(address)
        if kind is None or any(address.version == network.version and address in network for network in self.networks):
            return None
        return kind


PUBLIC_INTERNET: Final = EgressPolicy()


def _addresses_of(name: str) -> tuple[Address, ...]:
    if name in _LOOPBACK_NAMES or name.endswith(".localhost"):
        return _LOOPBACK
    return _METADATA if name in _METADATA_NAMES else ()


def _read(host: str) -> WrittenHost:
    try:
        return read_host(host)
    except UnreadableHostError as error:
        raise EgressRefusedError(repr(host)[:100], str(error)) from None


def _entry_host(entry: str, text: str) -> WrittenHost:
    try:
        return read_host(text)
    except UnreadableHostError:
        raise EgressEntryError(
            f"{entry!r} is not a host name, *.suffix, IP address or network (CIDR); leave schemes and ports out"
        ) from None


def _address(entry: str, host: WrittenHost) -> Network:
    address = plain(host.readings[0])
    if host.name not in (str(host.readings[0]), host.readings[0].exploded):
        raise EgressEntryError(f"{entry!r} is an unusual spelling; write {address}")
    return ip_network(address)


def _network(entry: str) -> Network:
    try:
        network = ip_network(entry)
    except ValueError as error:
        raise EgressEntryError(f"{entry!r} is not a network: {error}; write it as 10.0.0.0/8 or fd00::/8") from None
    if network.version == 6 and plain(network.network_address).version == 4:
        raise EgressEntryError(f"{entry!r} holds IPv4 addresses; write the IPv4 network")
    return network
