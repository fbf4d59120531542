"""What a job asks for: source URIs, mounts and credentials; refusals in the words of ``truss``, and never with a secret."""

import json

import pytest

from bdn.core.errors import InvalidMountError, InvalidRequestError, InvalidSourceError
from bdn.core.source.uri import (
    METHODS,
    Auth,
    AuthMethod,
    BucketUri,
    HuggingFaceUri,
    SourceUri,
    WeightsSource,
    check_mounts,
    normalise_mount,
    parse_source,
)

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(("text", "expected"), [
    ("hf://Qwen/Qwen3-0.6B", HuggingFaceUri("model", "Qwen/Qwen3-0.6B", None)),
    ("hf://o/r@main", HuggingFaceUri("model", "o/r", "main")),
    ("hf://o/r@v1.0.0", HuggingFaceUri("model", "o/r", "v1.0.0")),
    (f"hf://o/r@{SHA}", HuggingFaceUri("model", "o/r", SHA)),
    ("hf://o/r@refs/pr/7", HuggingFaceUri("model", "o/r", "refs/pr/7")),
    ("hf://o/r@feature/x", HuggingFaceUri("model", "o/r", "feature/x")),
    ("hf://o/r@a..b", HuggingFaceUri("model", "o/r", "a..b")),
    ("hf://o/r@a@b", HuggingFaceUri("model", "o/r", "a@b")),  # the revision begins at the first
    ("hf://o/r@a:b@c", HuggingFaceUri("model", "o/r", "a:b@c")),  # no credential
    ("hf://_o/r_.-x", HuggingFaceUri("model", "_o/r_.-x", None)),
    (f"hf://o/{'r' * 96}", HuggingFaceUri("model", f"o/{'r' * 96}", None)),
    ("hf://datasets/owner/repo", HuggingFaceUri("dataset", "owner/repo", None)),
    ("hf://datasets/owner/repo@refs/convert/parquet", HuggingFaceUri("dataset", "owner/repo", "refs/convert/parquet")),
    ("hf://spaces/owner/repo@main", HuggingFaceUri("space", "owner/repo", "main")),
    ("hf://Datasets/repo", HuggingFaceUri("model", "Datasets/repo", None)),
])  # fmt: skip
def test_a_hugging_face_uri_names_kind_repository_and_revision(text: str, expected: SourceUri) -> None:
    source = parse_source(text)
    assert source == expected
    assert source.scheme == "hf"
    assert str(source) == text


@pytest.mark.parametrize(("text", "expected"), [
    ("s3://bucket", BucketUri("s3", "bucket", "")),
    ("s3://bucket/prefix", BucketUri("s3", "bucket", "prefix")),
    ("s3://bucket/a/b/", BucketUri("s3", "bucket", "a/b/")),
    ("s3://bucket/a b/тест+%20", BucketUri("s3", "bucket", "a b/тест+%20")),
    ("s3://bucket/a..b/...", BucketUri("s3", "bucket", "a..b/...")),
    ("s3://my.dotted.bucket/x", BucketUri("s3", "my.dotted.bucket", "x")),
    ("s3://bucket//odd", BucketUri("s3", "bucket", "/odd")),
    ("s3://bucket/key:with:colons", BucketUri("s3", "bucket", "key:with:colons")),
    ("gs://bucket", BucketUri("gs", "bucket", "")),
    ("gs://under_score/folder/", BucketUri("gs", "under_score", "folder/")),
    ("r2://account.bucket", BucketUri("r2", "bucket", "", "account")),
    ("r2://account.bucket/p/q", BucketUri("r2", "bucket", "p/q", "account")),
    ("r2://account.eu.bucket", BucketUri("r2", "bucket", "", "account", "eu")),
    ("r2://0a1b2c3d.fedramp.my-bucket/p", BucketUri("r2", "my-bucket", "p", "0a1b2c3d", "fedramp")),
])  # fmt: skip
def test_a_bucket_uri_names_bucket_and_prefix_as_written(text: str, expected: SourceUri) -> None:
    source = parse_source(text)
    assert source == expected
    assert str(source) == text


def test_a_bucket_with_only_a_slash_is_the_whole_bucket() -> None:
    assert parse_source("s3://bucket/") == parse_source("s3://bucket")


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


def test_the_error_names_the_source_once() -> None:
    assert str(refusal_of("s3:///x")).count("s3:///x") == 1


SOURCE = parse_source("s3://bucket/x")


@pytest.mark.parametrize(("location", "normal"), [
    ("/models", "/models"), ("/models/", "/models"), ("//models///a", "/models/a"), ("/./models/./a/.", "/models/a"),
    ("/a b/тест", "/a b/тест"), ("/..a/b..", "/..a/b.."), ("/...", "/..."), (f"/{'x' * 255}", f"/{'x' * 255}"),
])  # fmt: skip
def test_a_mount_is_absolute_without_empty_or_dot_segments(location: str, normal: str) -> None:
    assert normalise_mount(location) == normal
    assert normalise_mount(normal) == normal


@pytest.mark.parametrize(("reason", "locations"), [
    ("absolute path", ["", "models", "./models", " /models", "~/models"]),
    ("root directory", ["/", "//", "/.", "/./"]),
    ("'..'", ["/..", "/a/../b", "/a/.."]),
    ("NUL", ["/a\0b"]),
    ("255 bytes", [f"/{'x' * 256}", f"/{'é' * 128}"]),
])  # fmt: skip
def test_any_other_mount_is_refused_with_the_reason(reason: str, locations: list[str]) -> None:
    for location in locations:
        with pytest.raises(InvalidMountError, match=reason) as caught:
            normalise_mount(location)
        assert caught.value.details()["mount_location"] == location


def test_a_source_holds_a_normalised_mount() -> None:
    assert WeightsSource(SOURCE, "/m").mount_location == "/m"
    with pytest.raises(InvalidMountError, match="not normalised"):
        WeightsSource(SOURCE, "/m/")
    with pytest.raises(InvalidMountError, match="absolute"):
        WeightsSource(SOURCE, "m")


@pytest.mark.parametrize(("locations", "named"), [
    (["/a", "/a"], "/a"), (["/x", "/a", "/b", "/a"], "/a"), (["/a", "/a/b"], "/a/b"),
    (["/a", "/a-b", "/a/b"], "/a/b"), (["/a", "/a b", "/a!", "/a/b/c"], "/a/b/c"), (["/a/b", "/a/c", "/a"], "/a/b"),
])  # fmt: skip
def test_equal_or_nested_mounts_are_refused_in_any_order(locations: list[str], named: str) -> None:
    for given in (locations, locations[::-1]):
        with pytest.raises(InvalidMountError) as caught:
            check_mounts(given)
        assert caught.value.mount_location == named


# Written out again, not taken from the code: this is the contract.
FIELDS = {
    "CUSTOM_SECRET": ["auth_secret_name"],
    "AWS_OIDC": ["aws_oidc_role_arn", "aws_oidc_region"],
    "GCP_OIDC": ["gcp_oidc_service_account", "gcp_oidc_workload_id_provider"],
    "AWS_ASSUME_ROLE": ["aws_assume_role_arn", "aws_assume_role_region"],
}
SCHEMES = {"CUSTOM_SECRET": {"hf", "s3", "gs", "r2"}, "AWS_OIDC": {"s3"}, "GCP_OIDC": {"gs"}, "AWS_ASSUME_ROLE": {"s3"}}
SOURCES = {"hf": "hf://o/r", "s3": "s3://bucket", "gs": "gs://bucket", "r2": "r2://account.bucket"}
NAMES = sorted(FIELDS)


def auth_of(method: str) -> Auth:
    return Auth(AuthMethod(method), {name: f"value of {name}" for name in FIELDS[method]})


def test_the_methods_and_their_fields_are_those_of_truss() -> None:
    assert {str(method): list(names) for method, (names, _) in METHODS.items()} == FIELDS
    assert {str(method): set(schemes) for method, (_, schemes) in METHODS.items()} == SCHEMES


@pytest.mark.parametrize("method", NAMES)
def test_a_method_has_exactly_its_fields_and_another_one_is_named_without_its_value(method: str) -> None:
    complete, names = auth_of(method).fields, ", ".join(FIELDS[method])
    missing = "must be provided when auth_method is"
    table: list[tuple[dict[str, str], str]] = [
        ({}, f"{names} {missing} {method}"),
        *(({other: complete[other] for other in complete if other != name}, f"{name} {missing} {method}") for name in complete),
        *((complete | {name: ""}, f"{name} {missing} {method}") for name in complete),
        *(
            (complete | {name: "hunter2"}, f"{name} cannot be specified when auth_method is {method}")
            for name in ("aws_region", *(name for other in NAMES for name in FIELDS[other] if other != method))
        ),
    ]  # fmt: skip
    for fields, message in table:
        with pytest.raises(InvalidRequestError) as caught:
            Auth(AuthMethod(method), fields)
        assert str(caught.value) == message


@pytest.mark.parametrize("scheme", sorted(SOURCES))
@pytest.mark.parametrize("method", NAMES)
def test_a_method_opens_only_the_schemes_that_it_fits_and_all_can_be_read_anonymously(method: str, scheme: str) -> None:
    auth, source = auth_of(method), parse_source(SOURCES[scheme])
    assert WeightsSource(source, "/m").auth is None
    if scheme in SCHEMES[method]:
        assert WeightsSource(source, "/m", auth=auth).auth is auth
    else:
        with pytest.raises(InvalidRequestError) as caught:
            WeightsSource(source, "/m", auth=auth)
        assert str(caught.value) == f"auth_method {method} does not fit {scheme}:// sources"


def test_only_a_custom_secret_has_a_name_to_resolve() -> None:
    names = {method: auth_of(method).secret_name for method in NAMES}
    assert names == dict.fromkeys(NAMES) | {"CUSTOM_SECRET": "value of auth_secret_name"}
