"""Source URIs that are refused, in the words of ``truss`` where it has some, and never with a secret."""

import json

import pytest

from bdn.core.errors import InvalidSourceError
from bdn.core.source.uri import parse_source

SUPPORTED = "Supported schemes: gs://, hf://, r2://, s3://"


def refusal_of(text: str) -> InvalidSourceError:
    with pytest.raises(InvalidSourceError) as caught:
        parse_source(text)
    assert not caught.value.transient
    return caught.value


@pytest.mark.parametrize("text", ["", "bucket/prefix", "owner/repo@main", "/data", "hf:/o/r", "s3:bucket", "C:\\x"])
def test_a_source_without_scheme_is_refused_with_the_supported_ones(text: str) -> None:
    message = str(refusal_of(text))
    assert f"Source {text!r} is missing a URI scheme" in message
    assert SUPPORTED in message


@pytest.mark.parametrize(
    "scheme", ["http", "https", "ftp", "file", "azure", "cw", "bt", "HF", "S3", "Gs", "R2", " hf", ""]
)
def test_an_unknown_or_upper_case_scheme_is_refused_with_the_supported_ones(scheme: str) -> None:
    message = str(refusal_of(f"{scheme}://owner/repo"))
    assert f"Unsupported source scheme '{scheme}://'" in message
    assert SUPPORTED in message


@pytest.mark.parametrize("rest", [
    "", "/", "//", "owner", "owner/", "/repo", "owner//repo", "owner/repo/", "a/b/c", "@main", "owner@main", "/@main",
    "datasets", "datasets/", "datasets/owner", "datasets/owner/", "datasets//repo", "datasets/a/b/c", "spaces/owner",
    "datasets/repo@main", "-o/r", ".o/r", "o/.r", "o/-r", "o w/r", "o/r?x", "o:x/r", "\u043e/r", "owner/repo ",
    f"o/{'r' * 97}",
])  # fmt: skip
def test_a_repository_needs_exactly_an_owner_and_a_name(rest: str) -> None:
    assert "Expected format: hf://owner/repo[@revision]" in str(refusal_of(f"hf://{rest}"))


@pytest.mark.parametrize("text", ["hf://owner/repo@", "hf://datasets/owner/repo@", "hf://@"])
def test_an_empty_revision_is_refused(text: str) -> None:
    assert "empty revision after '@'" in str(refusal_of(text))


@pytest.mark.parametrize(("scheme", "name"), [("s3", "S3"), ("gs", "GS")])
@pytest.mark.parametrize("rest", ["", "/", "/prefix", "-b/x", "b", ".bucket", "buck et/x", "b*/x", f"{'b' * 256}/x"])
def test_a_bucket_needs_a_name(scheme: str, name: str, rest: str) -> None:
    message = str(refusal_of(f"{scheme}://{rest}"))
    assert f"Invalid {name} URI format" in message
    assert f"Expected format: {scheme}://bucket[/path]" in message


@pytest.mark.parametrize("rest", [
    "", "/", "bucket", "nodothere/path", ".bucket", "account.", "account./p", "account..bucket", "account.eu.", "a.EU.bucket",
    "a.e1.bucket", "account.eu.x.bucket", "account.-bucket", "account.Bucket", "acc_ount.bucket", "account.b",
])  # fmt: skip
def test_an_r2_source_needs_an_account_and_a_bucket(rest: str) -> None:
    assert "Expected format: r2://account_id[.jurisdiction].bucket[/path]" in str(refusal_of(f"r2://{rest}"))


@pytest.mark.parametrize(("text", "name"), [
    ("s3://bucket@main", "S3"), ("s3://bucket/prefix@v1", "S3"), ("s3://bucket/a@b/c", "S3"),
    ("s3://bucket/p@", "S3"), ("gs://bucket/p@1", "GS"), ("r2://account.bucket/p@1", "R2"),
])  # fmt: skip
def test_a_revision_on_a_bucket_is_refused_in_basetens_words(text: str, name: str) -> None:
    assert str(refusal_of(text)) == (
        "The @ revision syntax is only valid for HuggingFace sources (hf://). "
        f"Source '{text}' uses {name} which does not support revisions."
    )


@pytest.mark.parametrize("text", [
    "hf://../repo", "hf://owner/..", "hf://owner/repo@..", "hf://owner/repo@../main", "hf://owner/repo@a/../b",
    "hf://datasets/../repo", "s3://../x", "s3://bucket/..", "s3://bucket/a/../b", "gs://bucket/../other", "gs://bucket/a/..",
    "r2://account.bucket/../x", "s3://bucket/../",
])  # fmt: skip
def test_a_parent_segment_is_refused(text: str) -> None:
    assert "has a '..' segment" in str(refusal_of(text))


@pytest.mark.parametrize("character", ["\0", "\n", "\r", "\t", "\x1b", "\x7f"])
@pytest.mark.parametrize("text", ["s3://bucket/a{}b", "hf://o/r@a{}b", "hf://o/r{}", "r2://a.bucket/{}"])
def test_a_control_character_is_refused_and_not_repeated(text: str, character: str) -> None:
    error = refusal_of(text.format(character))
    assert "control characters" in str(error)
    assert str(error).isprintable()


@pytest.mark.parametrize("text", [
    "hf://user:SECRET@owner/repo", "hf://user:SECRET@owner/repo@main", "hf://:SECRET@owner/repo",
    "s3://AKIA:SECRET@bucket/prefix", "s3://AKIA:ab/SECRET+cd@bucket/prefix", "s3://AKIA:x@SECRET@bucket",
    "s3://AKIA:x\nSECRET@bucket", "gs://user:SECRET@bucket", "r2://AKIA:SECRET@account.bucket",
    "https://user:SECRET@huggingface.co/o/r",
])  # fmt: skip
def test_credentials_in_a_uri_are_refused_and_not_repeated(text: str) -> None:
    error = refusal_of(text)
    assert "credentials do not belong in a source URI" in str(error)
    assert "://***@" in str(error)
    assert "SECRET" not in str(error) + repr(error) + json.dumps(error.details())


@pytest.mark.parametrize("text", [
    "AKIA:SECRET@bucket/prefix",
    "AKIA:ab/SECRET@bucket/prefix",
    "https://hf_SECRET@huggingface.co/o/r",
    "https://bucket.s3.amazonaws.com/key?X-Amz-Credential=SECRET&X-Amz-Signature=SECRET",
])  # fmt: skip
def test_a_pasted_token_or_signed_url_is_not_repeated_either(text: str) -> None:
    error = refusal_of(text)
    assert "SECRET" not in str(error) + repr(error) + json.dumps(error.details())


def test_a_colon_in_a_key_or_revision_is_no_credential() -> None:
    assert str(parse_source("s3://bucket/a:b")) == "s3://bucket/a:b"
    assert str(parse_source("hf://o/r@a:b@c")) == "hf://o/r@a:b@c"


def test_the_error_names_the_source_once() -> None:
    assert str(refusal_of("s3:///x")).count("s3:///x") == 1
