"""What an address is: the table at its edges, and the IPv6 forms that carry an IPv4 address."""

from ipaddress import IPv6Address, ip_address

import pytest

from bdn.core.egress import plain, special_kind

SPECIAL = {
    "unspecified": ["0.0.0.0", "0.255.255.255", "::"],
    "private": [
        "10.0.0.0", "10.255.255.255", "172.16.0.0", "172.31.255.255", "192.168.0.0", "192.168.255.255", "64:ff9b:1::1",
        "fec0::1", "::ffff:10.0.0.1", "2002:0a00:0001:ffff::1",
    ],
    "shared": ["100.64.0.0", "100.127.255.255"],
    "metadata": [
        "100.100.100.200", "168.63.129.16", "169.254.169.254", "169.254.170.2", "169.254.170.23", "192.0.0.192",
        "fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::",
    ],
    "loopback": ["127.0.0.0", "127.255.255.255", "::1", "::ffff:127.0.0.1", "64:ff9b::127.0.0.1", "2002:7f00:1::"],
    "link-local": ["169.254.0.0", "169.254.255.255", "fe80::", "fe80::1%eth0", "febf:ffff::"],
    "reserved": [
        "192.0.0.0", "192.0.0.255", "192.0.2.1", "192.88.99.1", "198.18.0.0", "198.19.255.255", "198.51.100.1",
        "203.0.113.1", "240.0.0.0", "255.255.255.255", "::2", "::7f00:1", "::ffff:0:7f00:1", "100::1", "2001::1",
        "2001:1ff:ffff::", "2001:db8::1", "3fff::1", "4000::", "5f00::1",
    ],
    "multicast": ["224.0.0.0", "239.255.255.255", "ff02::1"],
    "unique-local": ["fc00::", "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"],
}  # fmt: skip
PUBLIC = [
    "1.0.0.0", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0",
    "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0", "192.167.255.255", "192.169.0.0",
    "198.17.255.255", "198.20.0.0", "223.255.255.255", "2000::", "2001:200::1", "2606:4700::6810:7b60", "3ffe:ffff::1",
    "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::",
]  # fmt: skip


@pytest.mark.parametrize(("address", "kind"), [(one, kind) for kind, all_of in SPECIAL.items() for one in all_of])
def test_a_special_address_is_told_for_what_it_is(address: str, kind: str) -> None:
    assert kind in (special_kind(ip_address(address)) or "")


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_nothing_special(address: str) -> None:
    assert special_kind(ip_address(address)) is None


def test_a_mapped_address_is_the_ipv4_address_and_a_zone_does_not_count() -> None:
    assert plain(ip_address("::ffff:10.0.0.1")) == ip_address("10.0.0.1")
    assert plain(ip_address("fe80::1%eth0")) == IPv6Address("fe80::1")
    assert plain(ip_address("10.0.0.1")) == ip_address("10.0.0.1")
