"""Where the mirror may connect, and what the operator's list changes."""

import pytest

from bdn.core.egress import PUBLIC_INTERNET, EgressEntryError, EgressPolicy
from bdn.core.errors import EgressRefusedError


@pytest.mark.parametrize(("host", "kind"), [
    ("127.0.0.1", "a loopback address"), ("2130706433", "a loopback address"), ("0177.0.0.1", "a loopback address"),
    ("0x7f.1", "a loopback address"), ("127.0.0.1.", "a loopback address"),
    ("010.8.8.8", "a private address"),  # decimal to some
    ("[::1]", "a loopback address"), ("::ffff:10.0.0.1", "a private address"),
    ("[fe80::1%25eth0]", "a link-local address"), ("fc00::1", "a unique-local address"),
    ("169.254.169.254", "a cloud metadata address"), ("0xa9fea9fe", "a cloud metadata address"),
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


@pytest.mark.parametrize(("host", "asked"), [
    ("8.8.8.8", "8.8.8.8"), ("HuggingFace.co.", "huggingface.co"), ("bücher.example", "xn--bcher-kva.example"),
    ("[2606:4700::1111]", "2606:4700::1111"), ("localhost.example", "localhost.example"),
    ("notlocalhost", "notlocalhost"),
])  # fmt: skip
def test_any_other_host_is_admitted_and_what_is_asked_for_is_what_was_judged(host: str, asked: str) -> None:
    assert PUBLIC_INTERNET.admit(host) == asked


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
    policy.admit_resolved("minio.corp", ["10.0.0.5", "::ffff:10.0.0.5"])
    for host in ("10.0.0.4", "10.0.0.6", "64:ff9b::10.0.0.5", "2002:a00:5::", "::10.0.0.5"):
        with pytest.raises(EgressRefusedError):
            policy.admit(host)
    with pytest.raises(EgressRefusedError):
        policy.admit_resolved("minio.corp", ["10.0.0.5", "10.0.0.6"])


def test_a_network_admits_its_addresses_of_its_own_family() -> None:
    policy = EgressPolicy.parse("10.0.0.0/30 fd00::/64")
    for host in ("10.0.0.0", "10.0.0.3", "fd00::1"):
        policy.admit(host)
    for host in ("10.0.0.4", "fd00:0:0:1::"):
        with pytest.raises(EgressRefusedError):
            policy.admit(host)


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


@pytest.mark.parametrize("text", ["a, b", "a b", "a,b", " a\n\tb ,", "a,,b"])
def test_entries_stand_between_commas_or_white_space(text: str) -> None:
    assert EgressPolicy.parse(text).names == {"a", "b"}


def test_nothing_listed_is_the_public_internet() -> None:
    assert EgressPolicy.parse("") == EgressPolicy.parse(" ,\n") == PUBLIC_INTERNET


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


def test_an_ipv6_entry_may_have_brackets() -> None:
    assert EgressPolicy.parse("[fd00::1]") == EgressPolicy.parse("fd00::1")
