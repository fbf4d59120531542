"""What the host of an address means, in every spelling that a resolver takes.

``getaddrinfo`` takes what ``inet_aton`` takes: one to four numbers, each decimal, octal or hexadecimal, the last one filling
the remaining bytes. Python itself turns a name into ASCII first (IDNA), which makes digits and dots of other scripts plain
ones. What none of this can read is refused as a host: then nobody further on reads it in a way of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Final

from bdn.core.egress.special_addresses import Address

_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_ZONE: Final = re.compile(r"[a-z0-9_.~-]+")
_LONGEST_NAME: Final = 253


class UnreadableHostError(ValueError):
    """Neither a name nor an address."""


@dataclass(frozen=True, slots=True)
class WrittenHost:
    """A host as it was written. ``name`` is what to resolve: lower case, ASCII, no brackets, no final dot.

    ``readings`` are the addresses that it stands for without a resolver, more than one where readers differ (with leading
    zeros: octal to some, decimal to others); none for a name.
    """

    name: str
    readings: tuple[Address, ...] = ()


def read_host(host: str) -> WrittenHost:
    """Read a host, with or without the brackets of IPv6.

    Raises:
        UnreadableHostError: what it is not; the text itself is left out.
    """
    if ":" in host or host.startswith("["):
        return _ipv6(host)
    try:
        name = host.encode("idna").decode("ascii").lower().removesuffix(".")  # as ``socket`` does
    except UnicodeError:
        raise UnreadableHostError("it is not a host name") from None
    labels = name.split(".")
    if len(name) > _LONGEST_NAME:
        raise UnreadableHostError("it is not a host name")
    if _NUMBER.fullmatch(labels[-1]):
        return WrittenHost(name, _ipv4_readings(labels))
    if not all(map(_LABEL.fullmatch, labels)):
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
    """All readings of 1 to 4 numbers. The first is that of ``inet_aton``, if it has one."""
    if len(labels) > 4 or not all(map(_NUMBER.fullmatch, labels)):
        raise UnreadableHostError("it is not an IPv4 address")
    found = []
    for octal in (True, False):
        numbers = [_number(label, octal=octal) for label in labels]
        address = None if None in numbers else _assemble([number for number in numbers if number is not None])
        if address is not None and address not in found:
            found.append(address)
    if not found:
        raise UnreadableHostError("it is not an IPv4 address")
    return tuple(found)


def _number(text: str, *, octal: bool) -> int | None:
    if text.startswith("0x"):
        return int(text[2:] or "0", 16)
    if octal and len(text) > 1 and text.startswith("0"):
        return int(text, 8) if re.fullmatch(r"[0-7]+", text) else None
    return int(text)


def _assemble(numbers: list[int]) -> IPv4Address | None:
    """The address of 1 to 4 numbers: all but the last are bytes, the last one fills what is left."""
    *first, last = numbers
    left = 4 - len(first)
    if any(number > 0xFF for number in first) or last >= 1 << (8 * left):
        return None
    return IPv4Address(sum(number << (8 * (3 - place)) for place, number in enumerate(first)) + last)
