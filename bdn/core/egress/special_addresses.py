"""Which IP addresses do not lead to the public internet, and what they are instead.

A table of our own, because that of ``ipaddress`` differs between Python versions and calls some of these global. Source:
the IANA registries of special-purpose addresses (RFC 6890 and its updates), the clouds' own pages for metadata addresses.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_METADATA: Final = "a cloud metadata address"
_LOOPBACK: Final = "a loopback address"
_PRIVATE: Final = "a private address"
_LINK_LOCAL: Final = "a link-local address"
_SHARED: Final = "a shared carrier address (100.64.0.0/10)"
_MULTICAST: Final = "a multicast address"
_RESERVED: Final = "a reserved address"
_UNSPECIFIED: Final = "an unspecified address"
_UNIQUE_LOCAL: Final = "a unique-local address"

# Metadata first, then the rest: the first match names the address.
_KINDS_OF_IPV4: Final = tuple(
    (IPv4Network(network), kind)
    for network, kind in (
        ("169.254.169.254/32", _METADATA),  # AWS, Google, Azure and most others
        ("169.254.170.2/32", _METADATA),  # credentials of an ECS task
        ("169.254.170.23/32", _METADATA),  # credentials of an EKS pod
        ("100.100.100.200/32", _METADATA),  # Alibaba
        ("168.63.129.16/32", _METADATA),  # Azure's host, in a public range
        ("192.0.0.192/32", _METADATA),  # Oracle's classic cloud
        ("0.0.0.0/8", _UNSPECIFIED),  # Linux connects 0.0.0.0 to this machine
        ("10.0.0.0/8", _PRIVATE),
        ("100.64.0.0/10", _SHARED),
        ("127.0.0.0/8", _LOOPBACK),
        ("169.254.0.0/16", _LINK_LOCAL),
        ("172.16.0.0/12", _PRIVATE),
        ("192.0.0.0/24", _RESERVED),
        ("192.0.2.0/24", _RESERVED),  # documentation
        ("192.88.99.0/24", _RESERVED),  # relays of 6to4, ended by RFC 7526
        ("192.168.0.0/16", _PRIVATE),
        ("198.18.0.0/15", _RESERVED),  # measurements between networks
        ("198.51.100.0/24", _RESERVED),  # documentation
        ("203.0.113.0/24", _RESERVED),  # documentation
        ("224.0.0.0/4", _MULTICAST),
        ("240.0.0.0/4", _RESERVED),  # broadcast included
    )
)
_KINDS_OF_IPV6: Final = tuple(
    (IPv6Network(network), kind)
    for network, kind in (
        ("fd00:ec2::254/128", _METADATA),  # AWS
        ("fd00:ec2::23/128", _METADATA),  # credentials of an EKS pod
        ("fd20:ce::254/128", _METADATA),  # Google
        ("::/128", _UNSPECIFIED),
        ("::1/128", _LOOPBACK),
        ("fc00::/7", _UNIQUE_LOCAL),
        ("fe80::/10", _LINK_LOCAL),
        ("fec0::/10", _PRIVATE),  # site-local, ended by RFC 3879 and still routed inside
        ("ff00::/8", _MULTICAST),
        ("64:ff9b:1::/48", _PRIVATE),  # NAT64 inside a site (RFC 8215)
        ("2001::/23", _RESERVED),  # Teredo among them
        ("2001:db8::/32", _RESERVED),  # documentation
        ("3fff::/20", _RESERVED),  # documentation
    )
)
_NAT64: Final = IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR: Final = IPv6Network("2002::/16")
_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")  # nothing else has been given out (RFC 4291, section 2.4)


def plain(address: Address) -> Address:
    """The address that a connection goes to: an IPv4-mapped one is the IPv4 address itself. A zone is dropped."""
    if isinstance(address, IPv4Address):
        return address
    return address.ipv4_mapped or IPv6Address(int(address))


def special_kind(address: Address) -> str | None:
    """What a special address is, in words; None for a public one. Addresses that carry an IPv4 address are what that is."""
    address = plain(address)
    if isinstance(address, IPv4Address):
        return next((kind for network, kind in _KINDS_OF_IPV4 if address in network), None)
    if kind := next((kind for network, kind in _KINDS_OF_IPV6 if address in network), None):
        return kind
    if address in _NAT64:
        return special_kind(IPv4Address(int(address) & 0xFFFFFFFF))
    if address in _SIX_TO_FOUR:
        return special_kind(IPv4Address(int(address) >> 80 & 0xFFFFFFFF))
    return None if address in _GLOBAL_UNICAST else _RESERVED
