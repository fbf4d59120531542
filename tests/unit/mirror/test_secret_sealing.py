"""Sealed secrets: what opens them, what does not, and that nothing shows a value or a key."""

import subprocess

import pytest

from bdn.core.errors import InvalidRequestError, SecretMalformedError
from bdn.mirror.upstream.secrets import Keyring, new_key

OLD, NEW = new_key(), new_key()
VALUE = "hf_séame"


def test_what_was_sealed_opens_again_and_looks_different_every_time() -> None:
    keyring = Keyring.parse(NEW)
    sealed = [keyring.seal("default", "name", VALUE) for _ in range(2)]
    assert [keyring.open("default", "name", each) for each in sealed] == [VALUE, VALUE]
    assert sealed[0] != sealed[1]
    assert VALUE.encode() not in sealed[0]


def test_a_value_opens_under_its_own_name_and_organisation_alone() -> None:
    keyring = Keyring.parse(NEW)
    sealed = keyring.seal("default", "name", VALUE)
    for organisation, name in (("default", "other"), ("other", "name"), ('default", "name', ""), ("", "defaultname")):
        with pytest.raises(SecretMalformedError, match="made for another name or organisation"):
            keyring.open(organisation, name, sealed)


def test_every_changed_byte_is_noticed() -> None:
    keyring = Keyring.parse(NEW)
    sealed = keyring.seal("default", "name", VALUE)
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 1
        with pytest.raises(SecretMalformedError):
            keyring.open("default", "name", bytes(changed))
    for length in (0, 5, 9, 20, 21, len(sealed) - 1):
        with pytest.raises(SecretMalformedError):
            keyring.open("default", "name", sealed[:length])


def test_all_keys_open_and_the_first_one_seals() -> None:
    sealed = Keyring.parse(OLD).seal("default", "name", VALUE)
    both = Keyring.parse(f" {NEW} , {OLD} ,")
    assert both.open("default", "name", sealed) == VALUE
    assert both.sealed_with(sealed) == "older key"
    assert both.sealed_with(both.seal("default", "name", VALUE)) == "first key"
    assert Keyring.parse(NEW).open("default", "name", both.seal("default", "name", VALUE)) == VALUE
    assert Keyring.parse(NEW).sealed_with(sealed) == Keyring().sealed_with(sealed) == "unknown key"


def test_without_the_right_key_the_error_says_what_to_do() -> None:
    sealed = Keyring.parse(OLD).seal("default", "name", VALUE)
    with pytest.raises(
        SecretMalformedError, match="not among those of the mirror's BDN_SECRETS_KEY; add that key to it, or"
    ):
        Keyring.parse(NEW).open("default", "name", sealed)
    with pytest.raises(SecretMalformedError, match="would have to be in the mirror's BDN_SECRETS_KEY") as raised:
        Keyring.parse(None).open("default", "name", sealed)
    assert "bdn-admin secrets set name" in str(raised.value)
    for empty in (None, "", " , "):
        with pytest.raises(InvalidRequestError, match=r"'bdn-admin secrets new-key', set it as BDN_SECRETS_KEY"):
            Keyring.parse(empty).seal("default", "name", VALUE)


@pytest.mark.parametrize(
    "wrong",
    ["sesame", "c2VzYW1l", "A" * 40, "A" * 43 + "=" + "A" * 43 + "=", "é" * 32, "A" * 43 + "=!", "!" + "A" * 43],
)
def test_a_key_of_the_wrong_form_is_refused_by_its_place_and_not_shown(wrong: str) -> None:
    with pytest.raises(InvalidRequestError, match="key 2 is not 32 bytes in base64") as raised:
        Keyring.parse(f"{NEW},{wrong}")
    assert wrong not in str(raised.value)
    assert raised.value.__cause__ is None


def test_a_key_that_openssl_made_is_a_key() -> None:
    made = subprocess.run(["openssl", "rand", "-base64", "32"], capture_output=True, text=True, check=True).stdout
    keyring = Keyring.parse(made)
    assert keyring.open("o", "n", keyring.seal("o", "n", VALUE)) == VALUE
    assert Keyring.parse("+/" * 21 + "+=").keys == Keyring.parse("-_" * 21 + "-=").keys  # both alphabets


def test_no_key_is_in_a_repr() -> None:
    keyring = Keyring.parse(NEW)
    assert NEW not in repr(keyring)
    assert repr(keyring.keys[0])[2:-1] not in repr(keyring)
