"""Grants as values and as tokens: what one key signed, everybody can check, and nobody can change."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import unquote, urlsplit

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from bdn.core.errors import BdnError, GrantExpiredError, GrantInvalidError, InvalidMountError
from bdn.core.source.uri import HuggingFaceUri
from bdn.wire.grants import (
    ISSUER,
    FileGrant,
    Grant,
    GrantedMount,
    GrantSigner,
    GrantVerifier,
    UnknownKeyError,
    file_url,
    new_signing_key,
)
from bdn.wire.stage_schema import stage_id_of
from tests.support.content.names import named


def mount(location: str, manifest: str = "a", source: str = "hf://o/r") -> GrantedMount:
    return GrantedMount(location, named(manifest), source)


def test_a_grant_allows_the_manifests_that_it_names_and_no_other() -> None:
    grant = Grant("org", (mount("/x", "a"), mount("/y", "b"), mount("/z", "a")), 100.0)
    assert [grant.allows(named(word)) for word in "abc"] == [True, True, False]


@pytest.mark.parametrize(("locations", "problem"), [
    (("/x", "/x"), "is used twice"), (("/x/y", "/x"), "is inside"),
    (("/x/",), "not normalised"), (("x",), "must be an absolute path"),
])  # fmt: skip
def test_mounts_of_a_grant_are_normalised_and_neither_equal_nor_nested(locations: list[str], problem: str) -> None:
    with pytest.raises((ValueError, InvalidMountError), match=problem):
        Grant("org", tuple(mount(location) for location in locations), 100.0)


@pytest.mark.parametrize(("named_by", "is_named"), [
    ("hf://o/r@main", True), ("hf://o/r", True), ("hf://o/r2@main", False), ("hf://datasets/o/r", False), ("s3://o/r", False),
])  # fmt: skip
def test_a_grant_names_the_commits_of_its_mounts_and_no_other(named_by: str, is_named: bool) -> None:
    grant = Grant("org", (GrantedMount.at("/x", named("a"), named_by, "c" * 40), mount("/y")), 100.0)
    uri = HuggingFaceUri("model", "o/r", "c" * 40)
    assert Grant.of("org", 100.0, grant.claims()) == grant
    assert [grant.names(uri), grant.names(replace(uri, revision="d" * 40))] == [is_named, False]
    assert Grant.of("org", 100.0, {"mounts": grant.claims()["mounts"]}).mounts[0].commit is None  # of an older mirror


def test_a_grant_names_its_mirror_and_one_of_an_older_mirror_names_none() -> None:
    grant = Grant("org", (mount("/x"),), 100.0, mirror_id=f"mir_{'0' * 24}")
    assert Grant.of("org", 100.0, grant.claims()) == grant
    older = {name: value for name, value in grant.claims().items() if name != "mirror"}
    assert Grant.of("org", 100.0, older) == replace(grant, mirror_id=None)
    with pytest.raises(ValueError, match="is not the id of a mirror"):
        replace(grant, mirror_id="mir_x")


def test_equal_content_gives_an_equal_stage_id_in_any_order_of_mounts() -> None:
    stage_id = stage_id_of("job", "org", {"/x": "a", "/y": "b"})
    assert stage_id == stage_id_of("job", "org", {"/y": "b", "/x": "a"})
    assert stage_id.startswith("stg_")
    assert len(stage_id) == 28


NOW = 1_795_000_000.0
GRANT = Grant(
    "acme",
    (
        GrantedMount("/app/models/q", named("a"), "hf://Qwen/Qwen3-0.6B@main"),
        GrantedMount("/app/données", named("b"), "s3://bucket/ünïcode"),
    ),
    NOW + 3600,
)
PEM = new_signing_key()
SIGNER = GrantSigner(PEM)
VERIFIER = GrantVerifier(SIGNER.public_keys)
TOKEN = SIGNER.sign(GRANT)
CLAIMS: dict[str, Any] = jwt.decode(TOKEN, options={"verify_signature": False})


def signed(**changes: Any) -> str:
    """A token of the right key with other claims; None leaves a claim away."""
    claims = {name: value for name, value in {**CLAIMS, **changes}.items() if value is not None}
    key = serialization.load_pem_private_key(PEM, password=None)
    return jwt.encode(claims, key, algorithm="EdDSA", headers={"kid": SIGNER.key_id})  # type: ignore[arg-type]


def encoded(part: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


def refused(token: str, *, now: float = NOW) -> BdnError:
    """The error; anything else than one of ours fails the test."""
    with pytest.raises(BdnError) as raised:
        VERIFIER.verify(token, now=now)
    return raised.value


def test_a_grant_survives_being_signed_and_verified_until_its_last_moment_and_goes_through_a_header_as_it_is() -> None:
    assert VERIFIER.verify(TOKEN, now=NOW) == VERIFIER.verify(TOKEN, now=NOW + 3599.9) == GRANT
    assert TOKEN.isascii()
    assert not set(TOKEN) & set(" \r\n,;\"'")


def test_a_fraction_of_a_second_is_cut_from_the_expiry_and_never_added() -> None:
    token = SIGNER.sign(Grant(GRANT.organisation, GRANT.mounts, NOW + 10.9))
    assert VERIFIER.verify(token, now=NOW).expires_at == NOW + 10


def test_every_verifier_that_knows_the_public_key_accepts_the_token() -> None:
    keys = [
        *GrantSigner(new_signing_key()).public_keys,
        *SIGNER.public_keys,
        *GrantSigner(new_signing_key()).public_keys,
    ]
    assert GrantVerifier(json.loads(json.dumps(keys))).verify(TOKEN, now=NOW) == GRANT
    assert [key["kid"] == GrantSigner(PEM).key_id for key in keys] == [False, True, False]
    assert set(SIGNER.public_keys[0]) == {"kty", "crv", "x", "kid", "alg", "use"}


def test_a_key_of_another_kind_does_not_sign() -> None:
    other = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with pytest.raises(ValueError, match="Ed25519"):
        GrantSigner(other)


def forged() -> Iterator[tuple[str, str]]:
    """Tokens that the key has not signed."""
    head, _, signature = TOKEN.split(".")
    mounts = [["/app/models/q", str(named("other")), "hf://o/r"]]
    for change in ({"org": "globex"}, {"exp": int(NOW) + 10**9}, {"mounts": mounts}):
        yield f"altered {', '.join(change)}", f"{head}.{encoded(CLAIMS | change)}.{signature}"
    yield "altered signature", f"{TOKEN.removesuffix(signature)}{'B' if signature[0] == 'A' else 'A'}{signature[1:]}"
    other: Any = serialization.load_pem_private_key(new_signing_key(), password=None)
    yield "another key", jwt.encode(CLAIMS, other, algorithm="EdDSA", headers={"kid": SIGNER.key_id})
    for algorithm in ("none", "None", "NONE", "nOnE"):
        unsigned = f"{encoded({'alg': algorithm, 'typ': 'JWT', 'kid': SIGNER.key_id})}.{encoded(CLAIMS)}."
        yield f"{algorithm} without a signature", unsigned
        yield f"{algorithm} with a signature", unsigned + signature
    password = base64.urlsafe_b64decode(SIGNER.public_keys[0]["x"] + "=")
    yield "public key as a password", jwt.encode(CLAIMS, password, algorithm="HS256", headers={"kid": SIGNER.key_id})


@pytest.mark.parametrize("token", [pytest.param(token, id=what) for what, token in forged()])
def test_a_token_that_the_key_has_not_signed_is_refused(token: str) -> None:
    error = refused(token)
    assert (type(error), error.code) == (GrantInvalidError, "GRANT_INVALID")


def test_a_token_with_one_sign_changed_is_refused() -> None:
    parts = TOKEN.split(".")
    for number, part in enumerate(parts):
        # Not the last sign: some of its bits are padding, and a token that differs in those is the same.
        for place in range(len(part) - 1):
            changed = part[:place] + ("A" if part[place] != "A" else "z") + part[place + 1 :]
            assert refused(".".join([*parts[:number], changed, *parts[number + 1 :]])).code == "GRANT_INVALID"


def test_a_token_of_another_key_is_refused_and_says_that_a_newer_key_may_exist() -> None:
    error = refused(GrantSigner(new_signing_key()).sign(GRANT))
    assert isinstance(error, UnknownKeyError)
    assert error.code == "GRANT_INVALID"


@pytest.mark.parametrize("header", [{"alg": "EdDSA"}, {"alg": "EdDSA", "kid": ""}, {"alg": "EdDSA", "kid": "0" * 16}])
def test_a_token_without_a_key_that_we_know_is_refused(header: dict[str, str]) -> None:
    _, payload, signature = TOKEN.split(".")
    assert isinstance(refused(f"{encoded(header)}.{payload}.{signature}"), UnknownKeyError)


@pytest.mark.parametrize("late", [0.0, 0.5, 10.0**6])
def test_an_expired_grant_is_refused_with_the_moment_of_its_end(late: float) -> None:
    error = refused(TOKEN, now=NOW + 3600 + late)
    assert isinstance(error, GrantExpiredError)
    assert error.expired_at == "2026-11-18T12:06:40+00:00"


@pytest.mark.parametrize("changes", [
    {"aud": "bdn-mirror"}, {"aud": None}, {"iss": "somebody"}, {"iss": None}, {"exp": None}, {"exp": "soon"},
    {"org": None}, {"mounts": None}, {"mounts": ["/x"]}, {"mounts": [["/x", "b3:0"]]},
    {"mounts": [["/x", "b3:0", "hf://o/r"]]}, {"mounts": "x"}, {"mounts": 3},
], ids=str)  # fmt: skip
def test_a_signed_token_that_is_no_grant_for_us_is_refused(changes: dict[str, Any]) -> None:
    assert type(refused(signed(**changes))) is GrantInvalidError


def test_the_audience_is_one_of_several_that_a_token_may_name() -> None:
    assert VERIFIER.verify(signed(aud=["others", Grant.audience]), now=NOW) == GRANT
    assert CLAIMS["iss"] == ISSUER


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tokens whose signatures are looked at, from now on."""
    verified: list[str] = []
    decode = jwt.decode

    def note(token: str, *rest: Any, **more: Any) -> Any:
        verified.append(token)
        return decode(token, *rest, **more)

    monkeypatch.setattr(jwt, "decode", note)
    return verified


def test_a_grant_is_verified_once_and_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = noted(monkeypatch)
    verifier, other = GrantVerifier(SIGNER.public_keys), SIGNER.sign(Grant("org", (mount("/x"),), NOW + 60))
    for _ in range(3):
        assert verifier.verify(TOKEN, now=NOW) == GRANT
    assert verifier.verify(other, now=NOW).organisation == "org"
    assert verified == [TOKEN, other]
    with pytest.raises(GrantExpiredError):
        verifier.verify(other, now=NOW + 60)


def test_what_is_remembered_of_grants_is_bounded_by_their_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = noted(monkeypatch)
    monkeypatch.setattr("bdn.wire.grants._REMEMBERED_MOUNTS", bound := 3 * (1 + len(GRANT.mounts)))
    verifier = GrantVerifier(SIGNER.public_keys)
    tokens = [SIGNER.sign(Grant("org", GRANT.mounts, NOW + number)) for number in range(1, 5)]
    for token in (*tokens, *tokens[1:], tokens[0]):
        verifier.verify(token, now=NOW)
    assert verified == [*tokens, tokens[0]]
    for number in range(bound + 1):  # those that name nothing count, too
        verifier.verify(SIGNER.sign(Grant("org", (), NOW + 10 + number)), now=NOW)
    assert len(verifier._verified) <= bound


FILE = FileGrant("acme", named("a"), "step 1/gewichte ü%2F?.safetensors", NOW + 3600)


def test_a_files_signature_says_which_file_of_which_manifest_for_whom_and_until_when() -> None:
    signer = GrantSigner(new_signing_key())
    found = GrantVerifier(signer.public_keys).verify_as(FileGrant, signer.sign(FILE), now=NOW)
    assert found == FILE
    assert found.allows(named("a"), FILE.path)
    assert not found.allows(named("b"), FILE.path)
    assert not found.allows(named("a"), "step 1/other")


def test_it_is_the_audience_that_tells_them_apart_whatever_else_a_token_says() -> None:
    both = {"manifest": str(FILE.manifest), "path": FILE.path}
    assert VERIFIER.verify_as(FileGrant, signed(**both, aud=FileGrant.audience), now=NOW) == FILE
    assert VERIFIER.verify(signed(**both), now=NOW) == GRANT
    with pytest.raises(GrantInvalidError):
        VERIFIER.verify_as(FileGrant, signed(**both), now=NOW)
    with pytest.raises(GrantInvalidError):
        VERIFIER.verify(signed(**both, aud=FileGrant.audience), now=NOW)


@pytest.mark.parametrize(
    "changes",
    [{"manifest": None}, {"manifest": "b3:0"}, {"manifest": 3}, {"path": None}, {"org": None}, {"exp": None}],
    ids=str,
)
def test_a_signed_token_that_names_no_file_is_refused(changes: dict[str, Any]) -> None:
    named_file = {"manifest": str(FILE.manifest), "path": FILE.path, "aud": FileGrant.audience}
    with pytest.raises(GrantInvalidError):
        VERIFIER.verify_as(FileGrant, signed(**{**named_file, **changes}), now=NOW)


def test_the_address_of_a_file_keeps_every_sign_of_its_path() -> None:
    address = urlsplit(file_url("https://mirror.example:8460/", FILE, "h.c.p"))
    assert (address.netloc, address.query, address.fragment) == ("mirror.example:8460", "sig=h.c.p", "")
    assert unquote(address.path) == f"/files/{named('a')}/{FILE.path}"
