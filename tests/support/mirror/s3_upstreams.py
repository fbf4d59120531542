"""Servers with the interface of S3 as the upstreams of the contract suites, whatever they are and whatever scheme opens them."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol

from bdn.core.source.upstream import Source
from bdn.core.source.uri import BucketUri
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import Secret
from tests.contract.access_contract import SESAME
from tests.doubles.sigv4 import Account

_NUMBERS: Final = count()
WRONG: Final = Account("AKIANOBODY", SESAME)


class FilledBucket(Protocol):
    """A bucket as the test fills it."""

    @property
    def name(self) -> str: ...

    def put(self, objects: Mapping[str, bytes]) -> None: ...


@dataclass(frozen=True)
class S3Like:
    """A server, the settings that lead to it, and its accounts; ``stranger`` is a valid one that may read nothing."""

    settings: UpstreamSettings
    account: Account
    stranger: Account
    make_bucket: Callable[[str, bool], FilledBucket]  # by name, and whether everybody may read it
    r2_account: str = ""  # then its sources are r2's

    def bucket(self, *, public: bool = False) -> FilledBucket:
        """A new, empty one."""
        return self.make_bucket(f"bucket-{next(_NUMBERS)}", public)

    def open(
        self, bucket: str, prefix: str = "", account: Account | None = None, organisation: str = "acme"
    ) -> AbstractAsyncContextManager[Source]:
        """A source; without an account anonymously."""
        uri = BucketUri("r2" if self.r2_account else "s3", bucket, prefix, self.r2_account)
        return open_source(
            uri,
            sign_in=Secret("bucket-keys", keys_of(account)) if account else None,
            organisation=organisation,
            ambient_credentials=False,
            settings=self.settings,
        )


def keys_of(account: Account) -> str:
    """A secret's value."""
    keys = {"aws_access_key_id": account.access_key_id, "aws_secret_access_key": account.secret_access_key}
    return json.dumps(keys | ({"aws_session_token": account.session_token} if account.session_token else {}))


@dataclass(frozen=True)
class FolderUpstream:
    """A folder of a bucket, for ``SourceContract``."""

    server: S3Like
    bucket: FilledBucket
    prefix: str = ""
    anonymous: bool = False

    def fill(self, files: Mapping[str, bytes]) -> None:
        self.bucket.put({f"{self.prefix}{path}": content for path, content in files.items()})

    def open(self, organisation: str = "acme") -> AbstractAsyncContextManager[Source]:
        account = None if self.anonymous else self.server.account
        return self.server.open(self.bucket.name, self.prefix, account, organisation)


@dataclass(frozen=True)
class PrivateBucket:
    """For ``BucketContract``."""

    server: S3Like
    bucket: FilledBucket

    def put(self, objects: Mapping[str, bytes]) -> None:
        self.bucket.put(objects)

    def open(self, prefix: str = "") -> AbstractAsyncContextManager[Source]:
        return self.server.open(self.bucket.name, prefix, self.server.account)


@dataclass(frozen=True)
class S3Access:
    """For ``AccessContract``."""

    server: S3Like

    def public(self) -> AbstractAsyncContextManager[Source]:
        return self.server.open(self._filled(public=True))

    def private(self) -> AbstractAsyncContextManager[Source]:
        return self.server.open(self._filled(), "", self.server.account)

    def anonymous(self) -> AbstractAsyncContextManager[Source]:
        return self.server.open(self._filled())

    def wrong_key(self) -> AbstractAsyncContextManager[Source]:
        return self.server.open(self._filled(), "", WRONG)

    def denied(self) -> AbstractAsyncContextManager[Source]:
        return self.server.open(self._filled(), "", self.server.stranger)

    def missing(self) -> AbstractAsyncContextManager[Source]:
        return self.server.open("no-such-bucket", "", self.server.account)

    def _filled(self, *, public: bool = False) -> str:
        bucket = self.server.bucket(public=public)
        bucket.put({"a.txt": b"x"})
        return bucket.name
