"""Arguments of a command line that become sources."""

import pytest

from bdn.wire.named_sources import default_mount


@pytest.mark.parametrize(("source", "mount"), [
    ("hf://owner/repo@main", "/models/owner/repo"), ("bt://llama@job/step-1", "/models/llama"),
    ("s3://bucket/a/weights/", "/models/weights"), ("s3://bucket", "/models/bucket"),
    ("azure://account/container", "/models/container"), ("hf://buckets/owner/name", "/models/name"), ("hf://buckets/owner/name/a/b", "/models/b"), ("https://host/a/model.bin", "/models/model.bin"),
])  # fmt: skip
def test_default_mount__is_named_after_the_source(source: str, mount: str) -> None:
    assert default_mount(source) == mount
