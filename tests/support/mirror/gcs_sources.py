"""How the suites of GCS open their sources: against the double or the emulator, as one account or anonymously."""

import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from bdn.core.source.upstream import Source
from bdn.core.source.uri import parse_source
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import Secret
from tests.support.network.egress import LOOPBACK


class FilledBucket(Protocol):
    @property
    def name(self) -> str: ...

    def put(self, objects: Mapping[str, bytes]) -> None: ...


@dataclass(frozen=True)
class Way:
    """To a server, as somebody: ``key`` is the secret's JSON, or a text to take as it is; None is no secret."""

    url: str
    token_url: str = "http://127.0.0.1:9/no-token"  # the operator's own, for keys that name none
    key: object = None
    key_file: str | None = None
    ambient: bool = False

    def open(self, uri: str, organisation: str = "acme") -> AbstractAsyncContextManager[Source]:
        text = self.key if isinstance(self.key, str) else json.dumps(self.key)
        return open_source(
            parse_source(uri),
            sign_in=None if self.key is None else Secret("gcs-key", text),
            organisation=organisation,
            ambient_credentials=self.ambient,
            settings=UpstreamSettings(
                gcs_endpoint_url=self.url, google_token_url=self.token_url, gcs_key_file=self.key_file, egress=LOOPBACK
            ),
        )


@dataclass(frozen=True)
class FolderUpstream:
    """A folder of a bucket, or all of it, for ``SourceContract``."""

    way: Way
    bucket: FilledBucket
    folder: str = ""

    def fill(self, files: Mapping[str, bytes]) -> None:
        self.bucket.put({f"{self.folder}{path}": content for path, content in files.items()})

    def open(self, organisation: str = "acme") -> AbstractAsyncContextManager[Source]:
        return self.way.open(
            f"gs://{self.bucket.name}/{self.folder}".rstrip("/") + "/" * bool(self.folder), organisation
        )


@dataclass(frozen=True)
class PrefixedBucket:
    """A bucket, for ``BucketContract``."""

    way: Way
    bucket: FilledBucket

    def put(self, objects: Mapping[str, bytes]) -> None:
        self.bucket.put(objects)

    def open(self, prefix: str = "") -> AbstractAsyncContextManager[Source]:
        return self.way.open(f"gs://{self.bucket.name}/{prefix}" if prefix else f"gs://{self.bucket.name}")
