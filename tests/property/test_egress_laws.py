"""No spelling of a special address gets out; every public one does; the operator's list admits what it names."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.egress import PUBLIC_INTERNET, EgressPolicy, read_host
from bdn.core.errors import EgressRefusedError

# A list of its own, from the words of the design: the table of the code is not asked.
FORBIDDEN_V4 = [
    IPv4Network(text)
    for text in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.168.0.0/16", "224.0.0.0/4", "240.0.0.0/4", "168.63.129.16/32"),
    )
]
FORBIDDEN_V6 = [ip_network(text) for text in ("::/127", "fc00::/7", "fe80::/10", "ff00::/8")]
MAYBE_SPECIAL = [*FORBIDDEN_V4, *map(IPv4Network, ("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15"))]
MAYBE_SPECIAL += list(map(IPv4Network, ("198.51.100.0/24", "203.0.113.0/24")))

any_v4 = st.integers(0, 2**32 - 1).map(IPv4Address)
forbidden_v4 = st.sampled_from(FORBIDDEN_V4).flatmap(
    lambda network: st.integers(int(network.network_address), int(network.broadcast_address)).map(IPv4Address)
)
public_v4 = any_v4.filter(lambda address: not any(address in network for network in MAYBE_SPECIAL))
public_v6 = st.ip_addresses(v=6, network="2400::/6")  # given out by the registries, without an exception
words = st.text(st.sampled_from("abcdefghijklmnopqrstuvwxyz0123456789-"), min_size=1, max_size=8).filter(
    lambda word: word.strip("-") == word and word[0].isalpha()
)
names = st.lists(words, min_size=1, max_size=4).map(".".join)


@st.composite
def spelled_v4(draw: st.DrawFn, addresses: st.SearchStrategy[IPv4Address]) -> str:
    """Any text that ``inet_aton`` takes for the address, in any script, with or without a last dot."""
    packed = draw(addresses).packed
    count = draw(st.integers(1, 4))
    parts = [*packed[: count - 1], int.from_bytes(packed[count - 1 :], "big")]
    formats = st.sampled_from(["{}", "0x{:x}", "0X{:X}", "0{:o}", "0x000{:x}", "000{:o}"])
    text = ".".join(draw(formats).format(part) for part in parts)
    if draw(st.booleans()):
        text = "".join(chr(ord(letter) + 0xFEE0) if "!" <= letter <= "~" else letter for letter in text)  # full width
    dot = draw(st.sampled_from([".", "。", "\uff0e", "｡"]))
    return text.replace(".", dot).replace("\uff0e", dot) + draw(st.sampled_from(["", dot]))


@st.composite
def carried(draw: st.DrawFn, addresses: st.SearchStrategy[IPv4Address]) -> str:
    """An IPv6 form that carries the address: mapped, NAT64 or 6to4, with and without brackets."""
    value = int(draw(addresses))
    prefix = draw(st.sampled_from(["::ffff:0:0", "64:ff9b::"]))
    mixed = IPv6Address(int(IPv6Address(prefix)) + value)
    six_to_four = IPv6Address((0x2002 << 112) + (value << 80) + draw(st.integers(0, 2**80 - 1)))
    address = draw(st.sampled_from([mixed, six_to_four]))
    text = draw(st.sampled_from([str(address), address.exploded, str(address).upper()]))
    return draw(st.sampled_from(["{}", "[{}]"])).format(text)


@given(spelled_v4(forbidden_v4) | carried(forbidden_v4))
def test_no_spelling_of_a_forbidden_address_is_admitted(host: str) -> None:
    with pytest.raises(EgressRefusedError):
        PUBLIC_INTERNET.admit(host)
    with pytest.raises(EgressRefusedError):
        PUBLIC_INTERNET.admit_resolved("hub.example", ["8.8.8.8", str(read_host(host).readings[0])])


@given(st.sampled_from(FORBIDDEN_V6).flatmap(lambda network: st.ip_addresses(v=6, network=network)), st.booleans())
def test_no_forbidden_ipv6_address_is_admitted(address: IPv6Address, zoned: bool) -> None:
    host = f"[{address}%eth0]" if zoned else str(address)
    with pytest.raises(EgressRefusedError):
        PUBLIC_INTERNET.admit(host)
    with pytest.raises(EgressRefusedError):
        PUBLIC_INTERNET.admit_resolved("hub.example", [f"{address}%1" if zoned else str(address)])


@given(public_v4 | public_v6)
def test_every_public_address_is_admitted(address: IPv4Address | IPv6Address) -> None:
    assert PUBLIC_INTERNET.admit(str(address)) == str(address)
    PUBLIC_INTERNET.admit_resolved("hub.example", [str(address)])


@given(spelled_v4(any_v4))
def test_a_spelling_is_read_as_the_resolver_reads_it(host: str) -> None:
    """``inet_aton`` is the judge of what a spelling means; it reads nothing but plain ASCII without a last dot."""
    import socket

    plain = host.encode("idna").decode().removesuffix(".")
    assert read_host(host).readings[0] == IPv4Address(socket.inet_aton(plain))


@given(st.text(max_size=40))
def test_whatever_a_host_is_it_is_read_or_refused(host: str) -> None:
    try:
        name = PUBLIC_INTERNET.admit(host)
    except EgressRefusedError as error:
        assert str(error).isprintable()  # noqa: PT017 - most texts are refused, and that is a result as well
        return
    assert read_host(name).name == name  # reading it again changes nothing
    assert name.isascii()


@given(names, names, st.ip_addresses(v=4, network="10.0.0.0/8"))
def test_a_listed_name_admits_itself_alone(listed: str, other: str, address: IPv4Address) -> None:
    policy = EgressPolicy.parse(listed)
    policy.admit_resolved(policy.admit(listed.upper()), [str(address)])
    if other != listed:
        with pytest.raises(EgressRefusedError):
            policy.admit_resolved(other, [str(address)])


@given(names, names, st.ip_addresses(v=4, network="10.0.0.0/8"))
def test_a_suffix_admits_what_ends_with_it_after_a_dot(suffix: str, name: str, address: IPv4Address) -> None:
    policy = EgressPolicy.parse(f"*.{suffix}")
    policy.admit_resolved(f"{name}.{suffix}", [str(address)])
    for outside in (suffix, f"{name}{suffix}", f"{suffix}.{name}x"):
        if not outside.endswith(f".{suffix}"):
            with pytest.raises(EgressRefusedError):
                policy.admit_resolved(outside, [str(address)])


@given(st.ip_addresses(v=4, network="10.0.0.0/8"), st.integers(8, 32), st.ip_addresses(v=4, network="10.0.0.0/8"))
def test_a_listed_network_admits_its_addresses_alone(base: IPv4Address, length: int, address: IPv4Address) -> None:
    network = IPv4Network((base, length), strict=False)
    policy = EgressPolicy.parse(str(network))
    if address in network:
        policy.admit(str(address))
        policy.admit(f"::ffff:{address}")
    else:
        with pytest.raises(EgressRefusedError):
            policy.admit(str(address))
    with pytest.raises(EgressRefusedError):
        policy.admit(f"64:ff9b::{address}")
