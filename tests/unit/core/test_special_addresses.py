"""What an address is: the table at its edges, and the IPv6 forms that carry an IPv4 address."""

from ipaddress import IPv6Address, ip_address

import pytest

from bdn.core.egress import plain, special_kind

SPECIAL = [
    ("0.0.0.0", "unspecified"),
    ("0.255.255.255", "unspecified"),
    ("10.0.0.0", "private"),
    ("10.255.255.255", "private"),
    ("100.64.0.0", "shared"),
    ("100.127.255.255", "shared"),
    ("100.100.100.200", "metadata"),
    ("127.0.0.0", "loopback"),
    ("127.255.255.255", "loopback"),
    ("168.63.129.16", "metadata"),
    ("169.254.0.0", "link-local"),
    ("169.254.255.255", "link-local"),
    ("169.254.169.254", "metadata"),
    ("169.254.170.2", "metadata"),
    ("169.254.170.23", "metadata"),
    ("172.16.0.0", "private"),
    ("172.31.255.255", "private"),
    ("192.0.0.0", "reserved"),
    ("192.0.0.192", "metadata"),
    ("192.0.0.255", "reserved"),
    ("192.0.2.1", "reserved"),
    ("192.88.99.1", "reserved"),
    ("192.168.0.0", "private"),
    ("192.168.255.255", "private"),
    ("198.18.0.0", "reserved"),
    ("198.19.255.255", "reserved"),
    ("198.51.100.1", "reserved"),
    ("203.0.113.1", "reserved"),
    ("224.0.0.0", "multicast"),
    ("239.255.255.255", "multicast"),
    ("240.0.0.0", "reserved"),
    ("255.255.255.255", "reserved"),
    ("::", "unspecified"),
    ("::1", "loopback"),
    ("::2", "reserved"),
    ("::7f00:1", "reserved"),  # IPv4-compatible, ended by RFC 4291
    ("::ffff:0:7f00:1", "reserved"),  # IPv4-translated (RFC 2765)
    ("64:ff9b:1::1", "private"),
    ("100::1", "reserved"),
    ("2001::1", "reserved"),
    ("2001:1ff:ffff::", "reserved"),
    ("2001:db8::1", "reserved"),
    ("3fff::1", "reserved"),
    ("4000::", "reserved"),
    ("5f00::1", "reserved"),
    ("fc00::", "unique-local"),
    ("fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "unique-local"),
    ("fd00:ec2::254", "metadata"),
    ("fd00:ec2::23", "metadata"),
    ("fd20:ce::254", "metadata"),
    ("fe80::", "link-local"),
    ("fe80::1%eth0", "link-local"),
    ("febf:ffff::", "link-local"),
    ("fec0::1", "private"),
    ("ff02::1", "multicast"),
    ("::ffff:127.0.0.1", "loopback"),
    ("::ffff:10.0.0.1", "private"),
    ("::ffff:169.254.169.254", "metadata"),
    ("64:ff9b::127.0.0.1", "loopback"),
    ("64:ff9b::a9fe:a9fe", "metadata"),
    ("2002:7f00:1::", "loopback"),
    ("2002:0a00:0001:ffff::1", "private"),
    ("2002:a9fe:a9fe::", "metadata"),
]
PUBLIC = [
    "1.0.0.0", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0",
    "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0", "192.167.255.255", "192.169.0.0",
    "198.17.255.255", "198.20.0.0", "223.255.255.255", "2000::", "2001:200::1", "2606:4700::6810:7b60", "3ffe:ffff::1",
    "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::",
]  # fmt: skip


@pytest.mark.parametrize(("address", "kind"), SPECIAL)
def test_a_special_address_is_told_for_what_it_is(address: str, kind: str) -> None:
    assert kind in (special_kind(ip_address(address)) or "")


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_nothing_special(address: str) -> None:
    assert special_kind(ip_address(address)) is None


def test_a_mapped_address_is_the_ipv4_address_and_a_zone_does_not_count() -> None:
    assert plain(ip_address("::ffff:10.0.0.1")) == ip_address("10.0.0.1")
    assert plain(ip_address("fe80::1%eth0")) == IPv6Address("fe80::1")
    assert plain(ip_address("10.0.0.1")) == ip_address("10.0.0.1")
