"""How the suites open sources: of a hub, and of servers with the interface of S3 or of GCS, as one account or anonymously."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import count
from typing import Final, Literal, Protocol, Self

from bdn.core.source.upstream import Source
from bdn.core.source.uri import BucketUri, parse_source
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import Secret, SourceContext
from tests.contract.access_contract import SESAME, Access
from tests.doubles.gcs import GcsServer
from tests.doubles.gcs_accounts import GoogleAccount
from tests.doubles.hub import Hub
from tests.doubles.sigv4 import Account
from tests.support.network.egress import LOOPBACK

NUMBERS: Final = count()
STRANGER: Final = Account("AKIASTRANGER", "stranger")
Opened = AbstractAsyncContextManager[Source]


def open_hub(hub: Hub, uri: str, token: str | None = None, organisation: str = "acme") -> Opened:
    settings = UpstreamSettings(egress=LOOPBACK, hf_endpoint=hub.url)
    return open_source(
        parse_source(uri), SourceContext(organisation, settings, Secret("hub", token) if token else None)
    )


class FilledBucket(Protocol):
    """A bucket as the test fills it, without the code under test."""

    @property
    def name(self) -> str: ...

    def put(self, objects: Mapping[str, bytes]) -> None: ...


@dataclass(frozen=True)
class BucketUpstream:
    """A bucket or a folder of it, for ``SourceContract`` and ``BucketContract``."""

    bucket: FilledBucket
    open_prefix: Callable[[str], Opened]
    folder: str = ""

    def fill(self, files: Mapping[str, bytes]) -> None:
        self.bucket.put({f"{self.folder}{path}": content for path, content in files.items()})

    def open(self, prefix: str = "") -> Opened:
        return self.open_prefix(f"{self.folder}{prefix}")


def keys_of(account: Account, prefix: str = "aws_") -> str:
    """A secret's value."""
    keys = {f"{prefix}access_key_id": account.access_key_id, f"{prefix}secret_access_key": account.secret_access_key}
    return json.dumps(keys | ({f"{prefix}session_token": account.session_token} if account.session_token else {}))


@dataclass(frozen=True)
class S3Like:
    """A server, the settings that lead to it, and its accounts; ``stranger`` is a valid one that may read nothing."""

    settings: UpstreamSettings
    account: Account
    stranger: Account
    make_bucket: Callable[[str, bool], FilledBucket]  # by name, and whether everybody may read it
    scheme: Literal["s3", "r2", "cw"] = "s3"
    r2_account: str = ""

    def bucket(self, *, public: bool = False) -> FilledBucket:
        """A new, empty one."""
        return self.make_bucket(f"bucket-{next(NUMBERS)}", public)

    def open(self, bucket: str, prefix: str = "", account: Account | None = None, organisation: str = "acme") -> Opened:
        """A source; without an account anonymously."""
        uri = BucketUri(self.scheme, bucket, prefix, self.r2_account)
        secret = Secret("bucket-keys", keys_of(account)) if account else None
        return open_source(uri, SourceContext(organisation, self.settings, secret))

    def upstream(self, folder: str = "") -> BucketUpstream:
        """Of a new private bucket, read by its owner."""
        bucket = self.bucket()
        return BucketUpstream(bucket, lambda prefix: self.open(bucket.name, prefix, self.account), folder)

    def access(self) -> Access:
        """For ``AccessContract``."""
        accounts = {"wrong key": Account("AKIANOBODY", SESAME), "denied": self.stranger}
        accounts |= dict.fromkeys(("private", "missing"), self.account)

        def opened(way: str) -> Opened:
            bucket = self.bucket(public=way == "public")
            bucket.put({"a.txt": b"x"})
            return self.open("no-such-bucket" if way == "missing" else bucket.name, account=accounts.get(way))

        return opened


@dataclass(frozen=True)
class GcsWay:
    """To a server of GCS, as somebody: ``key`` is the secret's JSON, or a text to take as it is; None is no secret."""

    url: str
    token_url: str = "http://127.0.0.1:9/no-token"  # the operator's own, for keys that name none
    key: object = None
    key_file: str | None = None
    ambient: bool = False

    @classmethod
    def of(cls, server: GcsServer, account: GoogleAccount | None = None) -> Self:
        """With the key of an account, which is the one that may read the server's private buckets."""
        return cls(server.url, server.token_url, (account or server.account).key(server.token_url))

    @property
    def settings(self) -> UpstreamSettings:
        return UpstreamSettings(
            gcs_endpoint_url=self.url, google_token_url=self.token_url, gcs_key_file=self.key_file, egress=LOOPBACK
        )

    def open(self, bucket: str, prefix: str = "") -> Opened:
        text = self.key if isinstance(self.key, str) else json.dumps(self.key)
        secret = None if self.key is None else Secret("gcs-key", text)
        context = SourceContext("acme", self.settings, secret, ambient_credentials=self.ambient)
        return open_source(BucketUri("gs", bucket, prefix), context)

    def upstream(self, bucket: FilledBucket, folder: str = "") -> BucketUpstream:
        return BucketUpstream(bucket, lambda prefix: self.open(bucket.name, prefix), folder)


def gcs_access(server: GcsServer) -> Access:
    """For ``AccessContract``."""
    wrong = {**server.account.key(server.token_url), "private_key": GoogleAccount(SESAME).pem, "private_key_id": SESAME}
    ways = dict.fromkeys(("private", "missing"), GcsWay.of(server)) | {
        "wrong key": GcsWay(server.url, server.token_url, wrong),
        "denied": GcsWay.of(server, server.stranger),
    }

    def opened(way: str) -> Opened:
        bucket = server.bucket(f"access-{next(NUMBERS)}", public=way == "public")
        bucket.put({"a.txt": b"x"})
        return ways.get(way, GcsWay(server.url)).open("no-such-bucket" if way == "missing" else bucket.name)

    return opened
