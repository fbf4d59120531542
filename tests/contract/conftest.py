"""The servers that the suites of sources and stores ask: one of each kind for a file, empty of what the test before it left."""

from collections.abc import Iterator
from secrets import token_hex

import pytest
from huggingface_hub import close_session

from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import SourceContext
from tests.contract.opening import STRANGER, S3Like
from tests.doubles.gcs import GcsServer
from tests.doubles.hub import Hub
from tests.doubles.object_server import ObjectServer
from tests.doubles.s3 import S3Server
from tests.doubles.seaweed import RealS3
from tests.support.content.bucket_stores import s3_context
from tests.support.network.egress import LOOPBACK


@pytest.fixture(scope="module")
def shared_s3_server() -> Iterator[S3Server]:
    with S3Server() as server:
        server.accounts[STRANGER.access_key_id] = STRANGER
        server.strangers.add(STRANGER.access_key_id)
        yield server


@pytest.fixture
def s3_server(shared_s3_server: S3Server) -> S3Server:
    shared_s3_server.log.clear()
    shared_s3_server.script.clear()
    shared_s3_server.page_limit = 1000
    return shared_s3_server


@pytest.fixture
def s3(s3_server: S3Server) -> S3Like:
    settings = UpstreamSettings(egress=LOOPBACK, s3_endpoint_url=s3_server.url)
    return S3Like(settings, s3_server.account, STRANGER, lambda name, public: s3_server.bucket(name, public=public))


@pytest.fixture(scope="module")
def shared_gcs_server() -> Iterator[GcsServer]:
    with GcsServer() as server:
        yield server


@pytest.fixture
def gcs_server(shared_gcs_server: GcsServer) -> GcsServer:
    shared_gcs_server.log.clear()
    shared_gcs_server.script.clear()
    shared_gcs_server.page_limit = 1000
    return shared_gcs_server


@pytest.fixture(scope="module")
def object_server() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        yield server


@pytest.fixture(scope="module")
def seaweed(seaweed: RealS3) -> tuple[str, SourceContext]:
    """A bucket of the module's own."""
    return f"s3://{seaweed.bucket(f'store-{token_hex(4)}')}", s3_context(seaweed)


@pytest.fixture(scope="module")
def shared_hub(request: pytest.FixtureRequest) -> Iterator[Hub]:
    """Its pages are as long as the module says."""
    with Hub(page_size=request.module.PAGE) as hub:
        yield hub
    close_session()


@pytest.fixture
def hub(shared_hub: Hub) -> Hub:
    shared_hub.clear()
    return shared_hub
