"""The mirror as an issuer of identity tokens: its keys, what a token says, and the names in it, none of which reads like another's."""

import base64
import hashlib
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bdn.core.errors import InvalidRequestError
from bdn.mirror.settings import MirrorSettings
from bdn.mirror.upstream.issuer import IdentityIssuer, IdentityKeys, TokenSubject, load_issuer, new_identity_key

ISSUER = "https://mirror.example.test/tenant"
JOB = "mir_0123456789abcdef01234567"


@cache
def pem(number: int) -> bytes:
    return new_identity_key()


def pem_of(key: Any, form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8) -> bytes:
    made: bytes = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return made


def loaded(data_dir: Path, file: Path | None = None, **settings: Any) -> IdentityKeys:
    settings = {"data_dir": data_dir, "identity_key_file": file, "issuer_url": ISSUER, **settings}
    issuer = load_issuer(MirrorSettings(**settings), time.time)
    assert issuer is not None
    return issuer.keys


def test_a_key_is_made_once_and_readable_by_the_service_alone(tmp_path: Path) -> None:
    first = loaded(tmp_path)
    assert loaded(tmp_path).published == first.published
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert first.signing.key_size == 2048


def test_processes_that_start_together_have_the_same_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: loaded(tmp_path), range(4)))
    assert len({keys.published[0]["kid"] for keys in found}) == 1


def test_replicas_that_would_each_make_a_key_of_their_own_do_not_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="BDN_IDENTITY_KEY_FILE"):
        loaded(tmp_path, database_url="postgresql+asyncpg://db/bdn")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "keys.pem").write_bytes(pem(1))
    replica = loaded(tmp_path / "new", tmp_path / "keys.pem", database_url="postgresql+asyncpg://db/bdn")
    assert replica.published == IdentityKeys.parse(pem(1)).published


def test_the_operator_s_file_holds_any_form_of_rsa_key(tmp_path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    file = tmp_path / "key.pem"
    found = set()
    for form in (serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.TraditionalOpenSSL):
        file.write_bytes(b"a comment\n" + pem_of(key, form))
        found.add(loaded(tmp_path / "elsewhere", file).published[0]["kid"])
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


def test_a_key_is_changed_without_a_moment_in_which_tokens_are_refused() -> None:
    # The new key is published, then it signs, then the old one goes: tokens of the step before are always taken.
    steps = [IdentityKeys.parse(bundle) for bundle in (pem(1), pem(1) + pem(2), pem(2) + pem(1), pem(2))]
    for before, now in pairwise(steps):
        for token in (before.sign({"sub": "x"}), now.sign({"sub": "x"})):
            kid = jwt.get_unverified_header(token)["kid"]
            (published,) = [key for key in now.published if key["kid"] == kid]
            assert jwt.decode(token, jwt.PyJWK(published), algorithms=["RS256"]) == {"sub": "x"}


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


BROKEN = b"-----BEGIN PRIVATE KEY-----\nc2VzYW1l\n-----END PRIVATE KEY-----\n"
BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "holds no private key"),
    "a public key": (b"-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----\n", "holds no private key"),
    "broken": (BROKEN, "cannot be read"),
    "a second key that is broken": (pem(1) + BROKEN, "cannot be read"),
    "Ed25519": (pem_of(Ed25519PrivateKey.generate()), "not RSA"),
    "short": (pem_of(rsa.generate_private_key(public_exponent=65537, key_size=1024)), "at least 2048 bits"),
}


@pytest.mark.parametrize(("content", "problem"), BAD.values(), ids=BAD)
def test_a_file_that_holds_no_such_key_is_refused_with_what_to_do(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "key.pem"
    file.write_bytes(content)
    with pytest.raises(InvalidRequestError) as caught:
        loaded(tmp_path, file)
    for told in (problem, str(file), "openssl genrsa"):
        assert told in str(caught.value)
    assert "c2VzYW1l" not in str(caught.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"BDN_IDENTITY_KEY_FILE: .*absent\.pem cannot be read"):
        loaded(tmp_path, tmp_path / "absent.pem")
    assert list(tmp_path.iterdir()) == []


def test_a_token_says_who_asks_and_soon_ends() -> None:
    issuer = IdentityIssuer(ISSUER, IdentityKeys.parse(pem(1)), lambda: 1000.9)
    tokens = [issuer.token(TokenSubject("acme", "mir_1"), "a") for _ in range(2)]
    claims, other = (jwt.decode(token, options={"verify_signature": False}) for token in tokens)
    assert claims.pop("jti") != other.pop("jti")
    subject = {"sub": "v=1:org=acme:job=mir_1:type=mirror", "organisation": "acme", "job": "mir_1"}
    assert claims == other == {"iss": ISSUER, "aud": "a", "iat": 970, "nbf": 970, "exp": 1600, **subject}


def test_the_names_of_a_subject() -> None:
    subject = TokenSubject("acme", JOB)
    assert subject.claim == f"v=1:org=acme:job={JOB}:type=mirror"
    assert subject.pattern == "v=1:org=acme:job=*:type=mirror"
    assert subject.session_name == f"acme@{JOB}"
    assert subject.external_id == "bdn:acme"


@pytest.mark.parametrize("organisation", ["a", "A.b-c_9", "o" * 63])
def test_names_stay_inside_the_limits_of_the_clouds(organisation: str) -> None:
    subject = TokenSubject(organisation, JOB)
    assert len(subject.claim) <= 127  # Google's for google.subject
    assert re.fullmatch(r"[\w+=,.@-]{2,64}", subject.session_name, re.ASCII)  # STS: RoleSessionName
    assert re.fullmatch(r"[\w+=,.@:/-]{2,1224}", subject.external_id, re.ASCII)  # STS: ExternalId
    assert subject.session_name.endswith(f"@{JOB}")


def test_a_name_that_could_be_read_otherwise_is_refused() -> None:
    organisations = ("", "*", "a:job=b", "a=b", "a b", "a\n", "é", "-a", "o" * 64, "a/b", "a@b", "?")
    jobs = ("", "*", "mir:x", "mir_x\n", "MIR", "m" * 33)
    for organisation, job in (*((name, JOB) for name in organisations), *(("acme", name) for name in jobs)):
        with pytest.raises(InvalidRequestError):
            TokenSubject(organisation, job)
