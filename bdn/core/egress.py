"""The egress rule: the mirror may connect to the public internet, and to what ``BDN_EGRESS_ALLOW`` lists.

A connection is checked twice: first the host as written, then every address that the host resolves to. The caller
connects to one of the checked addresses and does not resolve again, because a second answer may differ (DNS rebinding).
Behind a proxy only the first check applies, because the proxy resolves.

The table of special addresses does not rely on ``ipaddress``, which differs between Python versions and calls some
special addresses global. Sources: the IANA registries of RFC 6890 and its updates, the clouds' pages for metadata
addresses. Hosts are parsed in every spelling that a resolver accepts (``inet_aton``: one to four numbers, each decimal,
octal or hexadecimal; IDNA maps digits and dots of other scripts to ASCII). An unparsable host is refused, so that no
later component can read it in another way.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, Self

from bdn.core.errors import EgressRefusedError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# The first match names the address, so metadata addresses come first.
_KINDS: Final = {
    "a cloud metadata address": (
        *("169.254.169.254", "fd00:ec2::254", "fd20:ce::254"),  # AWS, Google, Azure and most others
        *("169.254.170.2", "169.254.170.23", "fd00:ec2::23"),  # credentials of ECS tasks and EKS pods
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure's host, in a public range
        "192.0.0.192",  # Oracle's classic cloud
    ),
    "an unspecified address": ("0.0.0.0/8", "::"),  # Linux connects 0.0.0.0 to the local machine
    "a loopback address": ("127.0.0.0/8", "::1"),
    "a private address": (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
        "64:ff9b:1::/48",  # NAT64 inside a site (RFC 8215)
        "fec0::/10",  # site-local, deprecated by RFC 3879 and still routed inside sites
    ),
    "a shared carrier address (100.64.0.0/10)": ("100.64.0.0/10",),
    "a link-local address": ("169.254.0.0/16", "fe80::/10"),
    "a unique-local address": ("fc00::/7",),
    "a multicast address": ("224.0.0.0/4", "ff00::/8"),
    "a reserved address": (
        *("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20"),  # documentation
        "192.0.0.0/24",
        "192.88.99.0/24",  # 6to4 relays, deprecated by RFC 7526
        "198.18.0.0/15",  # benchmarks (RFC 2544)
        "240.0.0.0/4",  # broadcast included
        "2001::/23",  # includes Teredo
    ),
}
_SPECIAL: Final = tuple((ip_network(one), kind) for kind, networks in _KINDS.items() for one in networks)
_NAT64: Final = IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR: Final = IPv6Network("2002::/16")
_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")  # IANA has allocated nothing outside it (RFC 4291, section 2.4)


def plain(address: Address) -> Address:
    """The address that a connection really uses: IPv4-mapped ones become IPv4, and zones are dropped."""
    if isinstance(address, IPv4Address):
        return address
    return address.ipv4_mapped or IPv6Address(int(address))


def special_kind(address: Address) -> str | None:
    """Describe a special address; an address that embeds an IPv4 address counts as the IPv4 address.

    Returns:
        None: a public address.
    """
    address = plain(address)
    kind = next((kind for network, kind in _SPECIAL if address in network), None)
    if kind or isinstance(address, IPv4Address):
        return kind
    if address in _NAT64:
        return special_kind(IPv4Address(int(address) & 0xFFFFFFFF))
    if address in _SIX_TO_FOUR:
        return special_kind(IPv4Address(int(address) >> 80 & 0xFFFFFFFF))
    return None if address in _GLOBAL_UNICAST else "a reserved address"


_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_ZONE: Final = re.compile(r"[a-z0-9_.~-]+")
_LONGEST_NAME: Final = 253


class UnreadableHostError(ValueError):
    """The host is neither a name nor an address."""


@dataclass(frozen=True, slots=True)
class WrittenHost:
    """A host as written. ``name`` is what to resolve: lower case, ASCII, no brackets, no final dot.

    ``readings`` are the addresses that the text denotes without a resolver, none for a name. Parsers differ on leading
    zeros (octal or decimal), so there may be several.
    """

    name: str
    readings: tuple[Address, ...] = ()


def read_host(host: str) -> WrittenHost:
    """Parse a host, with or without the brackets of IPv6.

    Raises ``UnreadableHostError``; its message leaves the text out.
    """
    if ":" in host or host.startswith("["):
        return _ipv6(host)
    try:
        name = host.encode("idna").decode("ascii").lower().removesuffix(".")  # like ``socket``
    except UnicodeError:
        raise UnreadableHostError("it is not a host name") from None
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]) and len(name) <= _LONGEST_NAME:
        return WrittenHost(name, _ipv4_readings(labels))
    if len(name) > _LONGEST_NAME or not all(map(_LABEL.fullmatch, labels)):
        raise UnreadableHostError("it is not a host name")
    return WrittenHost(name)


def _ipv6(host: str) -> WrittenHost:
    text = (host[1:-1] if host.startswith("[") and host.endswith("]") else host).lower()
    address, mark, zone = text.partition("%")
    if mark and not _ZONE.fullmatch(zone):
        raise UnreadableHostError("it is not an IPv6 address")
    try:
        return WrittenHost(text, (IPv6Address(address),))
    except AddressValueError:
        raise UnreadableHostError("it is not an IPv6 address") from None


def _ipv4_readings(labels: list[str]) -> tuple[Address, ...]:
    """All readings of 1 to 4 numbers, the reading of ``inet_aton`` first if it has one."""
    if len(labels) > 4 or not all(map(_NUMBER.fullmatch, labels)):
        raise UnreadableHostError("it is not an IPv4 address")
    found: dict[Address, None] = {}
    for octal in (True, False):
        with suppress(ValueError, OverflowError):
            found[_assemble([_number(label, octal=octal) for label in labels])] = None
    if not found:
        raise UnreadableHostError("it is not an IPv4 address")
    return tuple(found)


def _number(text: str, *, octal: bool) -> int:
    if text.startswith("0x"):
        return int(text[2:] or "0", 16)
    return int(text, 8 if octal and len(text) > 1 and text.startswith("0") else 10)


def _assemble(numbers: list[int]) -> IPv4Address:
    """Assemble 1 to 4 numbers: all but the last are bytes, the last fills the remaining bytes."""
    *first, last = numbers
    return IPv4Address(bytes(first) + last.to_bytes(4 - len(first), "big"))


# Names that denote an address on some machines, whatever a resolver answers (RFC 6761; the clouds' own pages).
_LOOPBACK_NAMES: Final = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})
_METADATA_NAMES: Final = frozenset(
    {"metadata", "metadata.google.internal", "instance-data", "instance-data.ec2.internal"}
)


class EgressEntryError(ValueError):
    """An unreadable entry of ``BDN_EGRESS_ALLOW``; the message names the entry and the remedy."""


@dataclass(frozen=True, slots=True)
class EgressPolicy:
    """What the operator allows beyond the public internet.

    A name allows every address that it resolves to; an address allows only itself.
    """

    names: frozenset[str] = frozenset()
    suffixes: tuple[str, ...] = ()  # with the leading dot; a suffix admits names below it, not the bare domain
    networks: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse entries separated by commas or white space: names, ``*.suffix``, addresses, networks (CIDR).

        Raises ``EgressEntryError``.
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
        """Check a host as written, and return the name or address to resolve.

        Raises ``EgressRefusedError`` for an unreadable host, and for a host that is or always denotes a special
        address.
        """
        read = _read(host)
        if self._names(read):
            return read.name
        kinds = [self._refusal(address) for address in read.readings or _addresses_of(read.name)]
        # A spelling is as bad as its worst reading; a name with two addresses is as good as its better one.
        kind = next(filter(None, kinds), None)
        if kind and (read.readings or all(kinds)):
            raise EgressRefusedError(read.name, f"it is {kind}")
        return read.name

    def admit_resolved(self, host: str, addresses: Iterable[str]) -> None:
        """Check all addresses of a host. One refused address refuses the host.

        The error does not name the address: answers of the operator's own name servers are not for users.

        Raises ``EgressRefusedError``: one of the addresses is special and not allowed.
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
        return ip_address("127.0.0.1"), ip_address("::1")
    return (ip_address("169.254.169.254"),) if name in _METADATA_NAMES else ()


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
