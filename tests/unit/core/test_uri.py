"""What a job asks for: source URIs, mounts and credentials; refusals in the words of ``truss``, and never with a secret."""

import json

import pytest

from bdn.core.errors import InvalidMountError, InvalidRequestError, InvalidSourceError
from bdn.core.source.uri import (
    METHODS,
    Auth,
    AuthMethod,
    BucketUri,
    CheckpointUri,
    HuggingFaceUri,
    SourceUri,
    WeightsSource,
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
    ("hf://kernels/owner/repo", HuggingFaceUri("kernel", "owner/repo", None)),
    ("hf://Datasets/repo", HuggingFaceUri("model", "Datasets/repo", None)),
])  # fmt: skip
def test_a_hugging_face_uri_names_kind_repository_and_revision(text: str, expected: SourceUri) -> None:
    source = parse_source(text)
    assert source == expected
    assert source.scheme == "hf"
    assert str(source) == text


@pytest.mark.parametrize(("text", "expected"), [
    ("bt://llama", CheckpointUri("llama")),
    ("bt://llama@job1", CheckpointUri("llama", "job1")),
    ("bt://llama/checkpoint-100", CheckpointUri("llama", None, "checkpoint-100")),
    ("bt://llama@job1/checkpoint-100", CheckpointUri("llama", "job1", "checkpoint-100")),
    ("bt://llama@job1/checkpoint-100#rank-3", CheckpointUri("llama", "job1", "checkpoint-100", 3)),
    ("bt://llama#rank-12", CheckpointUri("llama", rank=12)),
    ("bt://llama@job1/.", CheckpointUri("llama", "job1", ".")),
    ("bt://llama@job1/a b:c@d#e", CheckpointUri("llama", "job1", "a b:c@d#e")),
])  # fmt: skip
def test_a_checkpoint_uri_names_project_job_checkpoint_and_rank(text: str, expected: SourceUri) -> None:
    source = parse_source(text)
    assert source == expected
    assert source.scheme == "bt"
    assert str(source) == text


def test_the_latest_job_and_rank_0_are_what_is_meant_without_them() -> None:
    assert parse_source("bt://llama@latest/x#rank-0") == parse_source("bt://llama/x")


@pytest.mark.parametrize("text", [
    "bt://", "bt://@job1", "bt://llama@", "bt://llama/", "bt://llama@job1/a/b", "bt://llama@job1/..", "bt://llama@job1/\udc9a", "bt://-x", "bt://a b ",
    "bt://llama@job 1", "bt://llama@job1/a\\b", f"bt://llama@job1/{'x' * 256}", "bt://llama@a@b",
])  # fmt: skip
def test_what_names_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(InvalidSourceError):
        parse_source(text)


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
    ("cw://bucket/prefix", BucketUri("cw", "bucket", "prefix")),
    ("gs://under_score/folder/", BucketUri("gs", "under_score", "folder/")),
    ("azure://account/container", BucketUri("azure", "container", "", "account")),
    ("azure://0acc/my-container/a b/ü", BucketUri("azure", "my-container", "a b/ü", "0acc")),
    ("azure://account/$root/a.bin", BucketUri("azure", "$root", "a.bin", "account")),
    ("hf://buckets/owner/bucket", BucketUri("hf", "bucket", "", "owner")),
    ("hf://buckets/o_1/b.2-c/a b/ü//x:y/", BucketUri("hf", "b.2-c", "a b/ü//x:y/", "o_1")),
    ("hf://buckets/datasets/tree/resolve", BucketUri("hf", "tree", "resolve", "datasets")),
    ("r2://account.bucket", BucketUri("r2", "bucket", "", "account")),
    ("r2://account.bucket/p/q", BucketUri("r2", "bucket", "p/q", "account")),
    ("r2://account.eu.bucket", BucketUri("r2", "bucket", "", "account", "eu")),
    ("r2://0a1b2c3d.fedramp.my-bucket/p", BucketUri("r2", "my-bucket", "p", "0a1b2c3d", "fedramp")),
])  # fmt: skip
def test_a_bucket_uri_names_bucket_and_prefix_as_written(text: str, expected: BucketUri) -> None:
    source = parse_source(text)
    assert source == expected
    assert str(source) == text
    assert parse_source(f"{text}/") == source or expected.prefix  # a bucket with only a slash is the whole bucket


def refusal_of(text: str) -> InvalidSourceError:
    with pytest.raises(InvalidSourceError) as caught:
        parse_source(text)
    assert not caught.value.transient
    return caught.value


SUPPORTED = "Supported schemes: azure://, bt://, cw://, gs://, hf://, https://, r2://, s3://"
HUB_FORM = "hf://owner/repo[@revision], hf://datasets/owner/repo, hf://spaces/owner/repo, hf://kernels/owner/repo or hf://buckets/namespace/name[/prefix]"
NO_REVISION = (
    "The @ revision syntax is only valid for HuggingFace sources (hf://). "
    "Source {{text!r}} uses {} which does not support revisions."
)
BUCKETS = ["", "/", "/prefix", "-b/x", "b", ".bucket", "buck et/x", "b*/x", f"{'b' * 256}/x"]
REFUSALS: list[tuple[str, list[str]]] = [
    (f"Source {{text!r}} is missing a URI scheme. {SUPPORTED}",
        ["", "/data", "hf:/o/r", "s3:bucket", "C:/x"]),
    (f"Source {{text!r}} is missing a URI scheme. {SUPPORTED}. Did you mean hf://{{text}}?", ["owner/repo", "owner/repo@main"]),
    *((f"Unsupported source scheme '{scheme}://' in {{text!r}}. {SUPPORTED}", [f"{scheme}://owner/repo"])
        for scheme in ("ftp", "file", "abfs", "")),
    *((f"Unsupported source scheme '{scheme}://' in {{text!r}}. {SUPPORTED}. Did you mean {likely}://?", [f"{scheme}://owner/repo"])
        for scheme, likely in (("http", "https"), ("gcs", "gs"), ("az", "azure"), ("bt2", "bt"), ("HF", "hf"), ("S3", "s3"), ("Gs", "gs"), ("R2", "r2"), (" hf", "hf"))),
    ("Invalid HTTPS URL format: {text!r}. Expected format: https://hostname[:port]/path, of one file", [f"https://{rest}" for rest in (
        "", "/", "host", "host/", "/path", "host/folder/", "h ost/a", "höst/a", "host:/a", "host:0/a", "host:65536/a", "host:x/a", "[::1/a",
    )]),
    *((f"Source {{text!r}} is a page of the hub and not a file. Did you mean hf://{likely}?", [f"https://huggingface.co/{rest}"]) for rest, likely in (
        ("o/r", "o/r"), ("o/r/", "o/r"), ("datasets/o/r", "datasets/o/r"), ("o/r/tree/v1", "o/r@v1"), ("buckets/o/b", "buckets/o/b"),
        ("buckets/o/b/", "buckets/o/b"), ("buckets/o/b/tree", "buckets/o/b"), ("buckets/o/b/tree/a/b.c", "buckets/o/b/a/b.c"),
    )),
    (f"Invalid HuggingFace URI format: {{text!r}}. Expected format: {HUB_FORM}", [f"hf://{rest}" for rest in (
        "", "/", "//", "owner", "owner/", "/repo", "owner//repo", "owner/repo/", "a/b/c", "@main", "owner@main", "/@main",
        "datasets", "datasets/", "datasets/owner", "datasets/owner/", "datasets//repo", "datasets/a/b/c", "spaces/owner",
        "datasets/repo@main", "-o/r", ".o/r", "o/.r", "o/-r", "o w/r", "o/r?x", "o:x/r", "\u043e/r", "owner/repo ",
        f"o/{'r' * 97}", "buckets", "buckets/", "buckets/name", "buckets//name", "buckets/owner/", "buckets/owner//x", "buckets/-o/b",
        "buckets/o/b c", f"buckets/o/{'b' * 97}", "buckets@main",
    )]),
    ("Source {text!r} has an '@'; buckets of the hub have no revisions", ["hf://buckets/o/b@main", "hf://buckets/o/b/p@1", "hf://buckets/o/b@"]),
    ("Source {text!r} has an empty revision after '@'; leave the '@' away for the default branch",
        ["hf://owner/repo@", "hf://datasets/owner/repo@", "hf://@"]),
    ("Invalid S3 URI format: {text!r}. Expected format: s3://bucket[/path]", [f"s3://{rest}" for rest in BUCKETS]),
    ("Invalid GS URI format: {text!r}. Expected format: gs://bucket[/path]", [f"gs://{rest}" for rest in BUCKETS]),
    ("Invalid CW URI format: {text!r}. Expected format: cw://bucket[/path]", [f"cw://{rest}" for rest in BUCKETS]),
    ("Invalid R2 URI format: {text!r}. Expected format: r2://account_id[.jurisdiction].bucket[/path]", [f"r2://{rest}" for rest in (
        "", "/", "bucket", "nodothere/path", ".bucket", "account.", "account./p", "account..bucket", "account.eu.", "a.EU.bucket",
        "a.e1.bucket", "account.eu.x.bucket", "account.-bucket", "account.Bucket", "acc_ount.bucket", "account.b",
    )]),
    (NO_REVISION.format("S3"), ["s3://bucket@main", "s3://bucket/prefix@v1", "s3://bucket/a@b/c", "s3://bucket/p@"]),
    (NO_REVISION.format("GS"), ["gs://bucket/p@1"]),
    (NO_REVISION.format("CW"), ["cw://bucket/p@1"]),
    ("Invalid AZURE URI format: {text!r}. Expected format: azure://account/container[/path]", [f"azure://{rest}" for rest in (
        "", "/", "account", "account/", "ac/container", "Account/container", "acc-ount/container", f"{'a' * 25}/container",
        "account/Container", "account/ab", "account/a--b", "account/-ab", "account/ab-", "account//path", "account/a.b",
    )]),
    (NO_REVISION.format("AZURE"), ["azure://account/container/p@1"]),
    (NO_REVISION.format("R2"), ["r2://account.bucket/p@1"]),
    ("Source {text!r} has a '..' segment", [
        "hf://../repo", "hf://owner/..", "hf://owner/repo@..", "hf://owner/repo@../main", "hf://owner/repo@a/../b",
        "hf://datasets/../repo", "s3://../x", "s3://bucket/..", "s3://bucket/a/../b", "gs://bucket/../other", "gs://bucket/a/..",
        "r2://account.bucket/../x", "s3://bucket/../", "hf://buckets/../b", "hf://buckets/o/..", "hf://buckets/o/b/a/..",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("message", "text"), [(message, text) for message, texts in REFUSALS for text in texts])
def test_any_other_source_is_refused_with_the_reason(message: str, text: str) -> None:
    assert str(refusal_of(text)) == message.format(text=text)


@pytest.mark.parametrize("character", ["\0", "\n", "\r", "\t", "\x1b", "\x7f"])
@pytest.mark.parametrize(
    "text", ["s3://bucket/a{}b", "hf://o/r@a{}b", "hf://o/r{}", "r2://a.bucket/{}", "https://host/a{}"]
)
def test_a_control_character_is_refused_and_not_repeated(text: str, character: str) -> None:
    error = refusal_of(text.format(character))
    assert "control characters" in str(error)
    assert str(error).isprintable()


WITHIN = "credentials do not belong in a source URI"


@pytest.mark.parametrize(("said", "text"), [
    *((WITHIN, text) for text in (
        "hf://user:SECRET@owner/repo", "hf://user:SECRET@owner/repo@main", "hf://:SECRET@owner/repo",
        "s3://AKIA:SECRET@bucket/prefix", "s3://AKIA:ab/SECRET+cd@bucket/prefix", "s3://AKIA:x@SECRET@bucket",
        "s3://AKIA:x\nSECRET@bucket", "gs://user:SECRET@bucket", "r2://AKIA:SECRET@account.bucket",
        "https://user:SECRET@huggingface.co/o/r", "https://SECRET@host/a", "https://SECRET@host/../a?SECRET",
    )),
    *(("", pasted) for pasted in (
        "AKIA:SECRET@bucket/prefix", "AKIA:ab/SECRET@bucket/prefix", "https://hf_SECRET@huggingface.co/o/r",
        "https://bucket.s3.amazonaws.com/key?X-Amz-Credential=SECRET&X-Amz-Signature=SECRET",
    )),
])  # fmt: skip
def test_credentials_in_a_uri_are_refused_and_not_repeated(said: str, text: str) -> None:
    error = refusal_of(text)
    assert said in str(error)
    assert not said or "://***@" in str(error)
    assert "SECRET" not in str(error) + repr(error) + json.dumps(error.details())


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
    source = parse_source("s3://bucket/x")
    assert WeightsSource(source, "/m").mount_location == "/m"
    for location, problem in (("/m/", "not normalised"), ("m", "absolute")):
        with pytest.raises(InvalidMountError, match=problem):
            WeightsSource(source, location)


# Written out again, not taken from the code: this is the contract.
FIELDS = {
    "CUSTOM_SECRET": ["auth_secret_name"],
    "AWS_OIDC": ["aws_oidc_role_arn", "aws_oidc_region"],
    "GCP_OIDC": ["gcp_oidc_service_account", "gcp_oidc_workload_id_provider"],
    "AWS_ASSUME_ROLE": ["aws_assume_role_arn", "aws_assume_role_region"],
}
SCHEMES = {
    "CUSTOM_SECRET": {"hf", "s3", "gs", "r2", "cw", "https", "azure"},
    "AWS_OIDC": {"s3"},
    "GCP_OIDC": {"gs"},
    "AWS_ASSUME_ROLE": {"s3"},
}
SOURCES = {
    "hf": "hf://o/r",
    "s3": "s3://bucket",
    "gs": "gs://bucket",
    "r2": "r2://account.bucket",
    "cw": "cw://bucket",
    "https": "https://host/file",
    "azure": "azure://account/container",
}
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


def test_an_arn_of_an_access_point_is_refused_with_the_advice_to_use_its_alias() -> None:
    with pytest.raises(InvalidSourceError, match="s3alias"):
        parse_source("s3://arn:aws:s3:us-west-2:123456789012:accesspoint/team-models/llama")
    assert str(parse_source("s3://team-m-abc123-s3alias/llama")) == "s3://team-m-abc123-s3alias/llama"
