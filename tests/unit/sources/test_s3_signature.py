"""Addresses that we sign are those that botocore would sign, and those that a strict server takes."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

import botocore.session
import pytest
from botocore.config import Config
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bdn.sources.s3.signature import CHECKSUM_MODE, AddressSigner, plain_address
from bdn.sources.settings import S3Credentials
from tests.doubles.gcs_accounts import GoogleAccount, private_key_of
from tests.doubles.goog4 import google_refusal_of
from tests.doubles.http_origin import Request
from tests.doubles.sigv4 import Account, refusal_of

SIGNED_AT = 1_795_253_774
KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
AWKWARD = st.text("ab/ +%~?#&=*'\"()[].-_\\:;@!$,<>\0\té日", min_size=1, max_size=20)
TOKENS = st.none() | st.text("abcXYZ019+/=", min_size=1, max_size=40)
VERSIONS = st.none() | st.text("abcXYZ019+/=._-%", min_size=1, max_size=32)


def botocore_client(address: str | None, region: str, credentials: S3Credentials) -> Any:
    return botocore.session.Session().create_client(
        "s3",
        region_name=region,
        endpoint_url=address,
        aws_access_key_id=credentials.access_key_id,
        aws_secret_access_key=credentials.secret_access_key,
        aws_session_token=credentials.session_token,
        config=Config(signature_version="s3v4", s3={"addressing_style": "path" if address else "virtual"}),
    )


@pytest.fixture(scope="module", params=[(None, "eu-west-1"), ("http://s3.test:9000", "auto"), ("https://s3.test", "x")])
def place(request: pytest.FixtureRequest) -> tuple[str, str, dict[str | None, Any]]:
    """The bucket's address, the region, and botocore's clients by session token."""
    address, region = request.param
    base = f"{address}/weights/" if address else f"https://weights.s3.{region}.amazonaws.com/"
    clients = {
        token: botocore_client(address, region, S3Credentials("AKIA", "s/e+c", token)) for token in (None, "t/o+k=")
    }
    return base, region, clients


def signed(signer: AddressSigner, key: str, version_id: str | None = None) -> str:
    """As a source reads an object."""
    return signer.address(key, {} if version_id is None else {"versionId": version_id}, headers=(CHECKSUM_MODE,))


@settings(max_examples=150, deadline=None)
@given(key=KEYS | AWKWARD, version_id=VERSIONS, token=st.sampled_from([None, "t/o+k="]), seconds=st.integers(1, 604800))
@example(key="/leading/../and//empty", version_id=None, token=None, seconds=3600)
def test_signatures_are_botocore_s(
    place: tuple[str, str, dict[str | None, Any]], key: str, version_id: str | None, token: str | None, seconds: int
) -> None:
    base, region, clients = place
    wanted = {"Bucket": "weights", "Key": key, "ChecksumMode": "ENABLED"}
    if version_id is not None:
        wanted["VersionId"] = version_id
    theirs = urlsplit(clients[token].generate_presigned_url("get_object", wanted, seconds))
    query = parse_qs(theirs.query, strict_parsing=True)
    signed_at = datetime.strptime(query["X-Amz-Date"][0], "%Y%m%dT%H%M%S%z").timestamp()
    signer = AddressSigner.of(base, region, S3Credentials("AKIA", "s/e+c", token), int(signed_at), seconds)
    ours = urlsplit(signed(signer, key, version_id))
    assert ours[:3] == theirs[:3]
    assert parse_qs(ours.query, strict_parsing=True) == query


def asked(address: str, **headers: str) -> Request:
    parts = urlsplit(address)
    target = address.removeprefix(f"{parts.scheme}://{parts.netloc}")
    return Request("GET", target, {"host": parts.netloc, CHECKSUM_MODE[0]: CHECKSUM_MODE[1], **headers})


@settings(max_examples=300, deadline=None)
@given(key=KEYS | AWKWARD, version_id=VERSIONS, token=TOKENS)
def test_a_strict_server_takes_them_and_nothing_else(key: str, version_id: str | None, token: str | None) -> None:
    signer = AddressSigner.of("http://s3.test:9000/w/", "auto", S3Credentials("AKIA", "s/e+c", token), SIGNED_AT, 3600)
    accounts = {"AKIA": Account("AKIA", "s/e+c", token)}
    now = datetime.fromtimestamp(SIGNED_AT + 3600, UTC)
    address = signed(signer, key, version_id)
    assert refusal_of(asked(address), accounts, now) == ""
    assert refusal_of(asked(address.replace("/w/", "/v/", 1)), accounts, now) == "SignatureDoesNotMatch"
    assert refusal_of(asked(address, **{"x-amz-checksum-mode": "OTHER"}), accounts, now) == "SignatureDoesNotMatch"
    assert refusal_of(asked(address, **{"x-amz-acl": "public-read"}), accounts, now) == "AccessDenied"
    assert refusal_of(asked(address), accounts, datetime.fromtimestamp(SIGNED_AT + 3601, UTC)) == "AccessDenied"


OTHERS = [
    ("PUT", "b3/a b", {}, (("x-amz-meta-a", "1.5-ab"), ("x-amz-checksum-crc32c", "AAAA=="))),
    ("DELETE", "b3/ü", {}, ()),
    ("HEAD", "k", {}, (CHECKSUM_MODE,)),
    ("GET", "", {"list-type": "2", "prefix": "a b/+", "continuation-token": "x/y+z==", "max-keys": "1000"}, ()),
]


@pytest.mark.parametrize(("method", "key", "query", "headers"), OTHERS)
def test_a_strict_server_takes_all_that_a_store_asks(
    method: str, key: str, query: dict[str, str], headers: tuple[tuple[str, str], ...]
) -> None:
    accounts = {"AKIA": Account("AKIA", "s/e+c", "token")}
    signer = AddressSigner.of("http://s3.test/w/", "auto", S3Credentials("AKIA", "s/e+c", "token"), SIGNED_AT, 60)
    address = signer.address(key, query, method=method, headers=headers)
    target = address.removeprefix("http://s3.test")
    request = Request(method, target, {"host": "s3.test", **dict(headers)})
    now = datetime.fromtimestamp(SIGNED_AT, UTC)
    assert refusal_of(request, accounts, now) == ""
    assert refusal_of(replace(request, method="POST"), accounts, now) == "SignatureDoesNotMatch"


@pytest.mark.parametrize(("method", "key", "query", "headers"), OTHERS)
def test_a_strict_google_takes_the_same(
    method: str, key: str, query: dict[str, str], headers: tuple[tuple[str, str], ...]
) -> None:
    account = GoogleAccount("signer")
    own = [(name.replace("x-amz-", "x-goog-"), value) for name, value in headers]
    base = "https://storage.googleapis.com/w/"
    signer = AddressSigner.of_google(base, account.email, private_key_of(account.name), SIGNED_AT, 60)
    target = signer.address(key, query, method=method, headers=own).removeprefix("https://storage.googleapis.com")
    request = Request(method, target, {"host": "storage.googleapis.com", **dict(own)})
    assert google_refusal_of(request, account, SIGNED_AT + 60) is None
    assert google_refusal_of(request, account, SIGNED_AT + 61) == "ExpiredToken"
    assert google_refusal_of(replace(request, method="POST"), account, SIGNED_AT) == "SignatureDoesNotMatch"


@pytest.mark.parametrize(
    ("ends", "expected"), [(None, SIGNED_AT + 3600), (SIGNED_AT + 90.5, SIGNED_AT + 90.5), (4e9, SIGNED_AT + 3600)]
)
def test_an_address_expires_with_its_time_or_with_the_keys(ends: float | None, expected: float) -> None:
    credentials = S3Credentials("AKIA", "secret", "token", None, ends)
    assert AddressSigner.of("https://s3.test/w/", "auto", credentials, SIGNED_AT, 3600).expires_at == expected


@pytest.mark.parametrize(("base", "host"), [
    ("https://s3.test:443/w/", "s3.test"),
    ("https://s3.test:4430/w/", "s3.test:4430"),
    ("http://S3.test:80/w/", "s3.test"),
    ("http://[::1]:9000/w/", "[::1]:9000"),
])  # fmt: skip
def test_the_host_is_signed_as_clients_send_it(base: str, host: str) -> None:
    signer = AddressSigner.of(base, "auto", S3Credentials("AKIA", "secret"), SIGNED_AT, 3600)
    request = asked(signed(signer, "k"), host=host)
    now = datetime.fromtimestamp(SIGNED_AT, UTC)
    assert refusal_of(request, {"AKIA": Account("AKIA", "secret")}, now) == ""


def test_no_repr_of_a_signer_shows_what_it_signs_with() -> None:
    signer = AddressSigner.of(
        "https://s3.test/w/", "auto", S3Credentials("AKIASESAME", "sesame", "sesame"), SIGNED_AT, 9
    )
    assert "sesame" not in repr(signer).lower()
    assert "X-Amz" not in repr(signer)


def test_a_plain_address_has_the_same_quoting_and_no_signature() -> None:
    assert (
        plain_address("https://s3.test/w/", "a b/ü+%.bin", "v/1")
        == "https://s3.test/w/a%20b/%C3%BC%2B%25.bin?versionId=v%2F1"
    )
