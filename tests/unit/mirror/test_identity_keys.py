"""Keys of identity tokens: kept, published and named as the standards say."""

import base64
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bdn.core.errors import InvalidRequestError
from bdn.mirror.upstream.issuer import IdentityKeys, load_identity_keys, new_identity_key


@cache
def pem(number: int) -> bytes:
    return new_identity_key()


def pem_of(key: Any, form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8) -> bytes:
    made: bytes = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return made


def test_a_key_is_made_once_and_readable_by_the_service_alone(tmp_path: Path) -> None:
    first = load_identity_keys(tmp_path, None)
    assert load_identity_keys(tmp_path, None).published == first.published
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert first.signing.key_size == 2048


def test_processes_that_start_together_have_the_same_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(lambda _: load_identity_keys(tmp_path, None), range(4)))
    assert len({keys.published[0]["kid"] for keys in loaded}) == 1


def test_the_operator_s_file_holds_any_form_of_rsa_key(tmp_path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    file = tmp_path / "key.pem"
    found = set()
    for form in (serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.TraditionalOpenSSL):
        file.write_bytes(b"a comment\n" + pem_of(key, form))
        found.add(load_identity_keys(tmp_path / "elsewhere", file).published[0]["kid"])
    assert len(found) == 1


def test_the_first_key_signs_and_all_are_published() -> None:
    keys = IdentityKeys.parse(pem(1) + pem(2))
    only_first, only_second = IdentityKeys.parse(pem(1)), IdentityKeys.parse(pem(2))
    assert keys.published == (only_first.published[0], only_second.published[0])
    token = keys.sign({"sub": "x"})
    assert jwt.get_unverified_header(token) == {"alg": "RS256", "typ": "JWT", "kid": keys.published[0]["kid"]}
    assert jwt.decode(token, jwt.PyJWK(keys.published[0]), algorithms=["RS256"]) == {"sub": "x"}
    with pytest.raises(jwt.InvalidSignatureError):
        jwt.decode(token, jwt.PyJWK(keys.published[1]), algorithms=["RS256"])


def test_a_key_id_is_the_thumbprint_of_rfc_7638() -> None:
    (published,) = IdentityKeys.parse(pem(1)).published
    text = f'{{"e":"{published["e"]}","kty":"RSA","n":"{published["n"]}"}}'
    assert json.loads(text)["e"] == "AQAB"
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    assert published["kid"] == digest


def test_nothing_private_is_published_or_shown() -> None:
    keys = IdentityKeys.parse(pem(1))
    assert set(keys.published[0]) == {"e", "n", "kty", "kid", "alg", "use"}
    assert "PRIVATE" not in repr(keys)
    assert "RSAPrivateKey" not in repr(keys)


BAD: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "holds no private key"),
    ("a public key", b"-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----\n", "holds no private key"),
    ("broken", b"-----BEGIN PRIVATE KEY-----\nc2VzYW1l\n-----END PRIVATE KEY-----\n", "cannot be read"),
    ("Ed25519", pem_of(Ed25519PrivateKey.generate()), "not RSA"),
    ("short", pem_of(rsa.generate_private_key(public_exponent=65537, key_size=1024)), "at least 2048 bits"),
]


@pytest.mark.parametrize(("content", "problem"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_file_that_holds_no_such_key_is_refused_with_what_to_do(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "key.pem"
    file.write_bytes(content)
    with pytest.raises(InvalidRequestError) as caught:
        load_identity_keys(tmp_path, file)
    assert problem in str(caught.value)
    assert str(file) in str(caught.value)
    assert "openssl genrsa" in str(caught.value)
    assert "c2VzYW1l" not in str(caught.value)


def test_a_second_key_that_cannot_be_read_is_not_left_out_silently(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    file.write_bytes(pem(1) + BAD[2][1])
    with pytest.raises(InvalidRequestError):
        load_identity_keys(tmp_path, file)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        load_identity_keys(tmp_path, tmp_path / "absent.pem")
    assert "BDN_IDENTITY_KEY_FILE" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
