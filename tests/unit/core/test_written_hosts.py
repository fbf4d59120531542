"""What a written host means: the spellings of addresses, and names that are none."""

from ipaddress import ip_address

import pytest

from bdn.core.egress import UnreadableHostError, WrittenHost, read_host

LOOPBACK = [
    "127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0X7F.1", "0x7f.0x0.0x0.0x1", "0177.0.0.1",
    "017700000001", "0177.0.0.0x1", "00000177.0.0.01", "127.0.0.1.", "①②⑦.⓪.⓪.①", "127。0。0。1",
    "\uff11\uff12\uff17\uff0e\uff10\uff0e\uff10\uff0e\uff11",  # full width
    "127\u00ad.0.0.1",  # a soft hyphen, which IDNA drops
]  # fmt: skip


@pytest.mark.parametrize("host", LOOPBACK)
def test_every_spelling_of_an_ipv4_address_is_that_address(host: str) -> None:
    assert read_host(host).readings[0] == ip_address("127.0.0.1")


@pytest.mark.parametrize(("host", "address"), [
    ("::1", "::1"), ("[::1]", "::1"), ("[0:0:0:0:0:0:0:1]", "::1"), ("::FFFF:10.0.0.1", "::ffff:10.0.0.1"),
    ("fe80::1%eth0", "fe80::1"), ("[fe80::1%25eth0]", "fe80::1"),
])  # fmt: skip
def test_ipv6_is_read_with_and_without_brackets_and_zone(host: str, address: str) -> None:
    assert read_host(host).readings == (ip_address(address),)


def test_leading_zeros_are_octal_to_some_readers_and_decimal_to_others() -> None:
    assert set(read_host("010.8.8.8").readings) == {ip_address("8.8.8.8"), ip_address("10.8.8.8")}
    assert read_host("08.8.8.8").readings == (ip_address("8.8.8.8"),)  # no octal number


@pytest.mark.parametrize(("host", "name"), [
    ("HuggingFace.CO", "huggingface.co"),
    ("huggingface.co.", "huggingface.co"),
    ("minio", "minio"),
    ("a_b.example", "a_b.example"),
    ("bücher.example", "xn--bcher-kva.example"),
    ("my-bucket.s3.us-east-1.amazonaws.com", "my-bucket.s3.us-east-1.amazonaws.com"),
    ("1e100.net", "1e100.net"),
    ("10.0.0.1.example", "10.0.0.1.example"),
    ("0x7f.example", "0x7f.example"),
    ("de.ad.be.ef", "de.ad.be.ef"),
])  # fmt: skip
def test_a_name_is_lower_case_ascii_without_its_last_dot(host: str, name: str) -> None:
    assert read_host(host) == WrittenHost(name)


@pytest.mark.parametrize("host", [
    "", ".", "..", "a..b", ".a", "a b", "a\nb", "a\0b", "a/b", "a@b", "a:80", "-a", "a-", "127%2e0%2e0%2e1",
    "%31%32%37.0.0.1", "127.0.0.1%00", "[::1", "[127.0.0.1]", "::1%", "::1%a b", "::g", "1.2.3.4.5",
    "256.256.256.256", "4294967296", "1.2.3.256", "1.2.65536", "127.0.0.1.2", "a.1", "a.0x1", "x" * 64,
    ".".join(["x" * 50] * 6), "9" * 5000, "\ud800",
])  # fmt: skip
def test_what_is_neither_is_unreadable(host: str) -> None:
    with pytest.raises(UnreadableHostError):
        read_host(host)
