"""Repositories of a Hugging Face hub: listings through the hub's client, bytes from the hub's own addresses."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from huggingface_hub import hf_hub_url
from huggingface_hub.hf_api import RepoFile

from bdn.core.errors import GatedSourceError, UpstreamUnavailableError
from bdn.core.source.upstream import (
    Checksum,
    ChecksumKind,
    Identity,
    Location,
    Resolution,
    Source,
    UpstreamFile,
    listed_path,
)
from bdn.core.source.uri import COMMIT, BucketUri, HuggingFaceUri
from bdn.core.store import PUBLIC, scope_of
from bdn.sources.huggingface.bucket import HubBucketSource
from bdn.sources.huggingface.requests import HubRequests
from bdn.sources.huggingface.session import warm_up
from bdn.sources.huggingface.tree import HubTree
from bdn.sources.sign_in import Secret, SourceContext, hugging_face_token


@dataclass(frozen=True, slots=True)
class _Repository:
    commit: str
    public: bool


class HuggingFaceSource:
    """One repository. Resolving costs one request, two if it is gated; a listing costs one per 1000 entries."""

    def __init__(self, uri: HuggingFaceUri, reader: str, hub: HubRequests) -> None:
        self._uri = uri
        self._reader = reader
        self._hub = hub
        self._repository: _Repository | None = None

    async def resolve(self) -> Resolution:
        """The current commit of the revision, once access is confirmed."""
        self._repository = await self._inspect(self._uri.revision)
        return Resolution(self._repository.commit)

    async def list(self, resolution: Resolution, within: Sequence[str] = ("",)) -> AsyncIterator[UpstreamFile]:
        """Yield the files of the commit, page by page. Checks access first unless this source resolved it."""
        if self._repository is None or self._repository.commit != resolution.revision:
            self._repository = await self._inspect(resolution.revision)
        repository = self._repository
        endpoint = self._hub.endpoint
        root = f"{endpoint}/api/{self._uri.kind}s/{self._uri.repo_id}/tree/{repository.commit}"
        async for files in HubTree(root, self._hub.headers(), endpoint, self._hub.call).files(within):
            for entry in files:
                yield self._file(entry, repository)

    async def locate(self, file: UpstreamFile) -> Location:
        """The address of the pinned file: on a CDN, signed and valid for about an hour, or on the hub itself.

        A file of one chunk gets the hub's address without a request: its redirect is followed like any other, and its
        checksum proves the bytes. ``etag`` stays None: a CDN's ETag differs from the hub's, and the commit in the
        address pins the bytes.
        """
        url = hf_hub_url(
            self._uri.repo_id,
            file.handle,
            repo_type=self._uri.kind,
            revision=file.version,
            endpoint=self._hub.endpoint,
        )
        if file.is_one_chunk:
            return self._hub.location(url)
        metadata = await self._hub.head(url, file)
        if metadata.commit_hash is None:
            raise UpstreamUnavailableError(str(self._uri), "the answer does not look like a hub's (no X-Repo-Commit)")
        return self._hub.location(metadata.location)

    async def _inspect(self, revision: str | None) -> _Repository:
        repo_id, kind, api = self._uri.repo_id, self._uri.kind, self._hub.api
        # "expand" omits the list of siblings from the answer: megabytes for large repositories, and incomplete there
        # (huggingface_hub#3122). Spaces do not offer "gated" that way, and kernels nothing; both are small.
        expand: Any = None if kind in ("space", "kernel") else ["sha", "private", "gated"]
        info = await self._hub.call(lambda: api.repo_info(repo_id, revision=revision, repo_type=kind, expand=expand))
        if info.sha is None or not COMMIT.fullmatch(info.sha):
            raise UpstreamUnavailableError(str(self._uri), "the answer does not look like a hub's (no commit)")
        if info.gated and kind == "kernel":
            raise GatedSourceError(str(self._uri))  # the hub's client cannot check access to kernels
        if info.gated:
            # The hub describes and lists gated repositories to any caller; only this request checks the token's access.
            await self._hub.call(lambda: api.auth_check(repo_id, repo_type=kind))
        # Shared with other organisations only if the hub explicitly says that it is not private.
        return _Repository(info.sha, public=info.private is False and not info.gated)

    def _file(self, entry: RepoFile, repository: _Repository) -> UpstreamFile:
        checksum = (
            Checksum(ChecksumKind.SHA256, entry.lfs.sha256)
            if entry.lfs
            else Checksum(ChecksumKind.GIT_BLOB, entry.blob_id)
        )
        scope = PUBLIC if repository.public else scope_of(self._reader)
        where = ("hf", self._hub.endpoint, self._uri.kind, self._uri.repo_id)
        identity = Identity.of(scope, *where, checksum.hex, str(entry.size))
        return UpstreamFile(
            listed_path(entry.path), entry.size, identity, entry.path, repository.commit, checksum, entry.blob_id
        )


@asynccontextmanager
async def open_hugging_face(uri: HuggingFaceUri | BucketUri, context: SourceContext) -> AsyncIterator[Source]:
    token = context.settings.hf_token if context.ambient_credentials else None
    if isinstance(context.sign_in, Secret):
        token = hugging_face_token(context.sign_in)
    await asyncio.to_thread(warm_up)
    hub = HubRequests(uri, context, token)
    if isinstance(uri, BucketUri):
        yield HubBucketSource(uri, context.reader, hub)
    else:
        yield HuggingFaceSource(uri, context.reader, hub)
