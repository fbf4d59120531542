"""Source URIs that are accepted, and what they say."""

import pytest

from bdn.core.source.uri import BucketUri, HuggingFaceUri, SourceUri, parse_source

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(("text", "expected"), [
    ("hf://Qwen/Qwen3-0.6B", HuggingFaceUri("model", "Qwen/Qwen3-0.6B", None)),
    ("hf://o/r@main", HuggingFaceUri("model", "o/r", "main")),
    ("hf://o/r@v1.0.0", HuggingFaceUri("model", "o/r", "v1.0.0")),
    (f"hf://o/r@{SHA}", HuggingFaceUri("model", "o/r", SHA)),
    ("hf://o/r@refs/pr/7", HuggingFaceUri("model", "o/r", "refs/pr/7")),
    ("hf://o/r@feature/x", HuggingFaceUri("model", "o/r", "feature/x")),
    ("hf://o/r@a..b", HuggingFaceUri("model", "o/r", "a..b")),
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


def test_a_trailing_slash_is_kept_because_it_says_folder() -> None:
    assert parse_source("s3://bucket/a/") != parse_source("s3://bucket/a")


def test_the_revision_begins_at_the_first_at_sign() -> None:
    assert parse_source("hf://o/r@a@b") == HuggingFaceUri("model", "o/r", "a@b")
