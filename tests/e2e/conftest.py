"""What the end-to-end tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Server
from tests.doubles.seaweed import RealS3
from tests.support.mirror.backends import BUCKET
from tests.support.services.commands import Shell


@pytest.fixture(autouse=True, scope="module")
def on_either(backend: str) -> None:
    """Every journey leads as well past what a mirror has in production."""


@pytest.fixture(scope="session")
def bucket_server(seaweed: RealS3) -> RealS3:
    """A real one: mirrors are processes here, which live by the time of day."""
    seaweed.bucket(BUCKET)
    return seaweed


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as double:
        yield double


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with S3Server() as double:
        yield double


@pytest.fixture
def shell(tmp_path: Path, hub: Hub, s3: S3Server) -> Shell:
    """A user whose upstreams are the doubles."""
    return Shell(tmp_path, {"HF_ENDPOINT": hub.url, "AWS_ENDPOINT_URL_S3": s3.url}, is_forked=True)
