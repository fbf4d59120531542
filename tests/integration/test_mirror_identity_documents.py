"""The mirror as an OpenID issuer: what it serves, to whom, and with which keys."""

import asyncio
import time
from pathlib import Path

import jwt
import pytest
from pydantic import ValidationError

from bdn.core.errors import InvalidRequestError
from bdn.mirror.app import open_mirror
from bdn.mirror.settings import MirrorSettings
from bdn.mirror.upstream.issuer import IdentityIssuer, IdentityKeys, TokenSubject, load_issuer, new_identity_key
from bdn.net.api_server import bind_tcp, serving
from tests.doubles.openid import OpenIdReader
from tests.support.mirror.service import mirror_under_test

pytest_plugins = ("tests.support.mirror.fixtures",)

ISSUER = "https://mirror.example.test/tenant"
DOCUMENTS = ("/.well-known/openid-configuration", "/.well-known/jwks.json")
SUBJECT = TokenSubject("acme", "mir_1")


async def test_the_documents_are_public_and_cacheable_where_everything_else_needs_a_token(tmp_path: Path) -> None:
    async with mirror_under_test(tmp_path, auth="token", token="t", issuer_url=ISSUER, work=False) as mirror:
        discovery, jwks = [await mirror.http.get(path) for path in DOCUMENTS]
        assert (await mirror.http.get("/mirror")).status_code == 401
    for answer in (discovery, jwks):
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "public, max-age=3600"
        assert answer.headers["content-type"] == "application/json"
    assert discovery.json() == {
        "issuer": ISSUER,
        "jwks_uri": f"{ISSUER}/.well-known/jwks.json",
        "response_types_supported": ["id_token"],
        "subject_types_supported": ["public"],
        "id_token_signing_alg_values_supported": ["RS256"],
        "claims_supported": ["iss", "aud", "sub", "iat", "nbf", "exp", "jti", "organisation", "job"],
    }
    assert [set(key) for key in jwks.json()["keys"]] == [{"kty", "n", "e", "kid", "alg", "use"}]


async def test_without_an_address_there_are_no_documents_and_no_key(tmp_path: Path) -> None:
    async with mirror_under_test(tmp_path, work=False) as mirror:
        for path in DOCUMENTS:
            answer = await mirror.http.get(path)
            assert answer.status_code == 404
            assert "BDN_ISSUER_URL" in answer.json()["error"]["message"]
    assert not (tmp_path / "identity-key.pem").exists()


async def test_the_key_stays_over_a_restart(tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        async with mirror_under_test(tmp_path, issuer_url=ISSUER, work=False) as mirror:
            seen.append((await mirror.http.get(DOCUMENTS[1])).json())
    assert seen[0] == seen[1]
    assert (tmp_path / "identity-key.pem").stat().st_mode & 0o777 == 0o600


async def test_a_key_is_changed_without_a_moment_in_which_tokens_are_refused(tmp_path: Path) -> None:
    old, new = new_identity_key(), new_identity_key()
    file = tmp_path / "keys.pem"
    reader = OpenIdReader(time.time)
    kids: list[list[str]] = []
    # published · signing · the old one gone; at each step also tokens of the step before are taken
    before = IdentityIssuer(ISSUER, IdentityKeys.parse(old))
    for bundle in (old, old + new, new + old, new):
        file.write_bytes(bundle)
        async with mirror_under_test(
            tmp_path / "mirror", issuer_url=ISSUER, identity_key_file=file, work=False
        ) as mirror:
            listener = bind_tcp("127.0.0.1", 0)
            reader.reach[ISSUER] = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with serving(mirror.service.api, listener):
                issuer = IdentityIssuer(ISSUER, IdentityKeys.parse(bundle))
                for signer in (before, issuer):
                    token = signer.token(SUBJECT, "sts.amazonaws.com")
                    await _claims(reader, token)
                before = issuer
                kids.append([key["kid"] for key in (await mirror.http.get(DOCUMENTS[1])).json()["keys"]])
    assert kids == [kids[0], [*kids[0], *kids[3]], [*kids[3], *kids[0]], kids[3]]


async def _claims(reader: OpenIdReader, token: str) -> dict[str, object]:
    return await asyncio.to_thread(reader.claims, token, issuer=ISSUER, audience="sts.amazonaws.com")


def test_a_token_says_who_asks_and_soon_ends() -> None:
    keys = IdentityKeys.parse(new_identity_key())
    issuer = IdentityIssuer(ISSUER, keys, lambda: 1000.9)
    tokens = [issuer.token(SUBJECT, "a") for _ in range(2)]
    claims, other = (jwt.decode(token, options={"verify_signature": False}) for token in tokens)
    assert claims.pop("jti") != other.pop("jti")
    assert (
        claims
        == other
        == {
            "iss": ISSUER,
            "aud": "a",
            "sub": "v=1:org=acme:job=mir_1:type=mirror",
            "iat": 970,
            "nbf": 970,
            "exp": 1600,
            "organisation": "acme",
            "job": "mir_1",
        }
    )


@pytest.mark.parametrize(
    "url",
    [
        "http://mirror.test",
        "mirror.test",
        "https://",
        "https://u:p@mirror.test",
        "https://m.test/?a",
        "https://m.test/#a",
    ],
)
def test_an_address_that_clouds_cannot_use_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValidationError, match="https address"):
        MirrorSettings(data_dir=tmp_path, issuer_url=url)


def test_a_slash_at_the_end_of_the_address_is_left_out(tmp_path: Path) -> None:
    assert MirrorSettings(data_dir=tmp_path, issuer_url=f"{ISSUER}/").issuer_url == ISSUER


def test_replicas_that_would_each_make_a_key_of_their_own_do_not_start(tmp_path: Path) -> None:
    settings = MirrorSettings(data_dir=tmp_path, issuer_url=ISSUER, database_url="postgresql+asyncpg://db/bdn")
    with pytest.raises(InvalidRequestError, match="BDN_IDENTITY_KEY_FILE"):
        load_issuer(settings, time.time)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "keys.pem").write_bytes(new_identity_key())
    issuers = [
        load_issuer(
            settings.model_copy(update={"data_dir": tmp_path / name, "identity_key_file": tmp_path / "keys.pem"}),
            time.time,
        )
        for name in ("a", "b")
    ]
    assert issuers[0] is not None
    assert issuers[1] is not None
    assert issuers[0].jwks() == issuers[1].jwks()


async def test_a_key_file_that_cannot_be_used_is_told_before_anything_is_served(tmp_path: Path) -> None:
    settings = MirrorSettings(data_dir=tmp_path, issuer_url=ISSUER, identity_key_file=tmp_path / "absent")
    with pytest.raises(InvalidRequestError, match="absent cannot be read"):
        async with open_mirror(settings, serve=False, work=False):
            pass
