"""Where the mirror may connect: what a written host means, what an address is, and what the operator's list changes."""

from ipaddress import ip_address

import pytest

from bdn.core.egress import (
    PUBLIC_INTERNET,
    EgressEntryError,
    EgressPolicy,
    UnreadableHostError,
    WrittenHost,
    read_host,
    special_kind,
)
from bdn.core.errors import EgressRefusedError


@pytest.mark.parametrize(("host", "address"), [
    ("::1", "::1"), ("[::1]", "::1"), ("[0:0:0:0:0:0:0:1]", "::1"), ("::FFFF:10.0.0.1", "::ffff:10.0.0.1"),
    ("fe80::1%eth0", "fe80::1"), ("[fe80::1%25eth0]", "fe80::1"),
])  # fmt: skip
def test_ipv6_is_read_with_and_without_brackets_and_zone(host: str, address: str) -> None:
    assert read_host(host).readings == (ip_address(address),)


def test_leading_zeros_are_octal_to_some_readers_and_decimal_to_others() -> None:
    assert set(read_host("010.8.8.8").readings) == {ip_address("8.8.8.8"), ip_address("10.8.8.8")}
    assert read_host("08.8.8.8").readings == (ip_address("8.8.8.8"),)  # no octal number


AS_THEY_ARE = [
    "minio", "a_b.example", "my-bucket.s3.us-east-1.amazonaws.com", "1e100.net", "10.0.0.1.example", "0x7f.example",
    "de.ad.be.ef", "localhost.example", "notlocalhost",
]  # fmt: skip


@pytest.mark.parametrize(("host", "name"), [
    ("HuggingFace.CO", "huggingface.co"), ("huggingface.co.", "huggingface.co"),
    ("bücher.example", "xn--bcher-kva.example"), *zip(AS_THEY_ARE, AS_THEY_ARE, strict=True),
])  # fmt: skip
def test_a_name_is_lower_case_ascii_without_its_last_dot_and_asked_for_as_it_was_judged(host: str, name: str) -> None:
    assert read_host(host) == WrittenHost(name)
    assert PUBLIC_INTERNET.admit(host) == name
    assert PUBLIC_INTERNET.admit("[2606:4700::1111]") == "2606:4700::1111"


@pytest.mark.parametrize("host", [
    "", ".", "..", "a..b", ".a", "a b", "a\nb", "a\0b", "a/b", "a@b", "a:80", "-a", "a-", "127%2e0%2e0%2e1",
    "%31%32%37.0.0.1", "127.0.0.1%00", "[::1", "[127.0.0.1]", "::1%", "::1%a b", "::g", "1.2.3.4.5",
    "256.256.256.256", "4294967296", "1.2.3.256", "1.2.65536", "127.0.0.1.2", "a.1", "a.0x1", "x" * 64,
    ".".join(["x" * 50] * 6), "9" * 5000, "\ud800",
])  # fmt: skip
def test_what_is_neither_is_unreadable(host: str) -> None:
    with pytest.raises(UnreadableHostError):
        read_host(host)


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


def test_special_addresses_are_told_for_what_they_are_and_public_ones_are_nothing_special() -> None:
    for kind, addresses in SPECIAL.items():
        assert [address for address in addresses if kind not in (special_kind(ip_address(address)) or "")] == []
    assert [address for address in PUBLIC if special_kind(ip_address(address)) is not None] == []


@pytest.mark.parametrize(("host", "kind"), [
    ("0x7f.1", "a loopback address"), ("①②⑦.⓪.⓪.①", "a loopback address"),
    ("127\u00ad.0.0.1", "a loopback address"),  # a soft hyphen, which IDNA drops
    ("[fe80::1%25eth0]", "a link-local address"),
    ("010.8.8.8", "a private address"),  # decimal to some
    ("169.254.169.254", "a cloud metadata address"),
    ("localhost", "a loopback address"), ("LOCALHOST.", "a loopback address"),
    ("anything.localhost", "a loopback address"), ("ip6-localhost", "a loopback address"),
    ("metadata.google.internal", "a cloud metadata address"), ("Metadata", "a cloud metadata address"),
    ("a b", "not a host name"), ("127%2e0%2e0%2e1", "not a host name"),
])  # fmt: skip
def test_a_special_host_is_refused_as_it_is_written(host: str, kind: str) -> None:
    with pytest.raises(EgressRefusedError, match=f"it is {kind}") as raised:
        PUBLIC_INTERNET.admit(host)
    assert "BDN_EGRESS_ALLOW" in str(raised.value)
    assert raised.value.code == "EGRESS_REFUSED"
    assert not raised.value.transient


def test_a_name_is_refused_for_any_address_that_it_resolves_to_and_the_address_is_not_told() -> None:
    PUBLIC_INTERNET.admit_resolved("hub.example", ["8.8.8.8", "2606:4700::1111"])
    for addresses in (["10.1.2.3"], ["8.8.8.8", "10.1.2.3"], ["10.1.2.3", "8.8.8.8"], ["8.8.8.8", "fe80::1%eth0"]):
        with pytest.raises(EgressRefusedError, match=r"it resolves to a (private|link-local) address") as raised:
            PUBLIC_INTERNET.admit_resolved("hub.example", addresses)
        assert raised.value.host == "hub.example"
        assert not {"10.1.2.3", "fe80"} & set(str(raised.value).replace(";", " ").split())


def test_a_name_admits_itself_and_whatever_it_resolves_to() -> None:
    policy = EgressPolicy.parse("Minio.Corp")
    assert policy.admit("minio.corp.") == "minio.corp"
    policy.admit_resolved("MINIO.corp", ["10.0.0.5", "169.254.169.254"])
    for host in ("minio", "a.minio.corp", "xminio.corp"):
        with pytest.raises(EgressRefusedError):
            policy.admit_resolved(host, ["10.0.0.5"])
    with pytest.raises(EgressRefusedError):
        policy.admit("10.0.0.5")


def test_the_zone_of_an_address_is_not_a_name_that_a_suffix_could_admit() -> None:
    policy = EgressPolicy.parse("*.corp")
    for host in ("fe80::1%a.corp", "[::1%25a.corp]"):
        with pytest.raises(EgressRefusedError):
            policy.admit(host)


def test_an_address_admits_itself_in_every_spelling_and_no_other() -> None:
    policy = EgressPolicy.parse("10.0.0.5")
    for host in ("10.0.0.5", "0xa000005", "10.5", "::ffff:10.0.0.5", "[::ffff:a00:5]"):
        policy.admit(host)
    EgressPolicy.parse("fd00::/64").admit("fd00::1")
    with pytest.raises(EgressRefusedError):
        EgressPolicy.parse("fd00::/64").admit("fd00:0:0:1::")
    policy.admit_resolved("minio.corp", ["10.0.0.5", "::ffff:10.0.0.5"])
    for host in ("10.0.0.4", "10.0.0.6", "64:ff9b::10.0.0.5", "2002:a00:5::", "::10.0.0.5"):
        with pytest.raises(EgressRefusedError):
            policy.admit(host)
    with pytest.raises(EgressRefusedError):
        policy.admit_resolved("minio.corp", ["10.0.0.5", "10.0.0.6"])


@pytest.mark.parametrize("allow", ["127.0.0.1", "::1"])
def test_localhost_is_admitted_as_written_with_either_of_its_addresses_and_judged_again_when_resolved(
    allow: str,
) -> None:
    policy = EgressPolicy.parse(allow)
    assert policy.admit("localhost") == "localhost"
    policy.admit_resolved("localhost", [allow])
    with pytest.raises(EgressRefusedError, match="resolves to a loopback address"):
        policy.admit_resolved("localhost", ["127.0.0.1", "::1"])
    EgressPolicy.parse("localhost").admit_resolved("localhost", ["127.0.0.1", "::1"])


def test_a_metadata_address_that_is_allowed_is_admitted_by_its_names_too() -> None:
    assert EgressPolicy.parse("169.254.169.254").admit("metadata.google.internal")


def test_entries_stand_between_commas_or_white_space_and_none_are_the_public_internet() -> None:
    for text in ("a, b", "a b", "a,b", " a\n\tb ,", "a,,b"):
        assert EgressPolicy.parse(text).names == {"a", "b"}
    assert EgressPolicy.parse("") == EgressPolicy.parse(" ,\n") == PUBLIC_INTERNET
    assert EgressPolicy.parse("[fd00::1]") == EgressPolicy.parse("fd00::1")


@pytest.mark.parametrize(("entry", "said"), [
    ("http://minio", "'http://minio'"), ("minio:9000", "leave schemes and ports out"),
    ("[::1]:80", "leave schemes and ports out"), ("10.0.0.1/8", "host bits set"), ("10.0.0.0/33", "not a network"),
    ("minio/24", "not a network"), ("127.1", "write 127.0.0.1"), ("0x7f.0.0.1", "write 127.0.0.1"),
    ("::ffff:10.0.0.1", "write 10.0.0.1"), ("::ffff:10.0.0.0/104", "write the IPv4 network"),
    ("*.10.0.0.1", "write a network"), ("*", "'*'"), ("*.", "'*.'"), ("a.*", "'a.*'"), ("*a", "'*a'"),
    ("a..b", "'a..b'"),
])  # fmt: skip
def test_an_entry_that_names_nothing_is_refused_with_what_to_write(entry: str, said: str) -> None:
    with pytest.raises(EgressEntryError) as raised:
        EgressPolicy.parse(f"minio.corp, {entry}")
    assert said in str(raised.value)
