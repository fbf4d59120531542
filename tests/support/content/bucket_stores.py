"""Stores in buckets of the servers that tests have, opened as a mirror opens them."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from bdn.core.pace.retry import RetryPolicy
from bdn.core.source.uri import BucketUri, parse_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import Secret, SourceContext
from bdn.store.access import open_access
from bdn.store.bucket import PATIENCE, Bucket
from bdn.store.bucket_store import BucketStore, open_bucket_store
from tests.contract.opening import keys_of
from tests.doubles.gcs import GcsServer
from tests.doubles.sigv4 import Account
from tests.support.network.egress import LOOPBACK


class S3Server(Protocol):
    """Any server of S3."""

    account: Account

    @property
    def url(self) -> str: ...


def s3_context(server: S3Server) -> SourceContext:
    settings = UpstreamSettings(egress=LOOPBACK, s3_endpoint_url=server.url, r2_endpoint_url=server.url)
    return SourceContext("", settings, Secret("store", keys_of(server.account)))


def store_environment(server: S3Server, address: str) -> dict[str, str]:
    """What a mirror is told that has its store at this ``s3://`` address of the server."""
    return {
        "BDN_STORE": address,
        "BDN_STORE_ENDPOINT": server.url,
        "BDN_STORE_SECRET": "store",
        "BDN_INFRASTRUCTURE_SECRET_STORE": keys_of(server.account),
    }


def gcs_context(server: GcsServer) -> SourceContext:
    settings = UpstreamSettings(egress=LOOPBACK, gcs_endpoint_url=server.url, google_token_url=server.token_url)
    return SourceContext("", settings, Secret("store", json.dumps(server.account.key(server.token_url))))


def bucket_at(address: str, context: SourceContext, patience: RetryPolicy | None = None) -> Bucket:
    """It waits shortly: what it waits for is near."""
    uri = parse_source(address)
    assert isinstance(uri, BucketUri)
    return Bucket(uri, open_access(uri, context), patience or PATIENCE, lambda seconds: time.sleep(min(seconds, 0.01)))


@contextmanager
def store_at(address: str, context: SourceContext, patience: RetryPolicy | None = None) -> Iterator[BucketStore]:
    bucket = bucket_at(address, context, patience)
    try:
        yield open_bucket_store(bucket)
    finally:
        bucket.close()
