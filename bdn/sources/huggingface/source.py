"""Repositories of a Hugging Face hub, asked through the real client and read from the hub's own addresses.

Nothing is downloaded by the client and its shared cache is never used: on 401, 403 and 5xx it would silently serve what
it has, which is no proof of access.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import urlsplit

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.hf_api import DatasetInfo, ModelInfo, RepoFile, SpaceInfo
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined] # that is where it is documented

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.egress.rules import EgressPolicy
from bdn.core.errors import InvalidSourceError, SourceChangedError, UpstreamUnavailableError
from bdn.core.pace.retry import ASK_ONCE
from bdn.core.ports import Asker, Location, Resolution
from bdn.core.source.paths import UnsafePathError, normalise_path
from bdn.core.source.upstream import Checksum, ChecksumKind, Identity, UpstreamFile
from bdn.core.source.uri import HuggingFaceUri
from bdn.core.store.slabs import PUBLIC, scope_of
from bdn.sources.credentials import Secret, hugging_face_token
from bdn.sources.huggingface.errors import SDK_ERRORS, HubErrors
from bdn.sources.huggingface.session import one_attempt, warm_up
from bdn.sources.huggingface.tree import HubListing, HubTree
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import SignIn

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Repository:
    commit: str
    public: bool


class HuggingFaceSource:
    """One repository. One request resolves it, two if it is gated, and each 1000 entries of its tree cost another.

    Args:
        uri: which repository, and which revision of it.
        endpoint: the hub, such as ``https://huggingface.co``.
        token: None reads anonymously; nothing is ever taken from the machine's own login.
        organisation: who alone may find private or gated content again.
        egress: where its requests may go.
        asker: sends each of them.
    """

    def __init__(
        self,
        uri: HuggingFaceUri,
        *,
        endpoint: str,
        token: str | None,
        organisation: str,
        egress: EgressPolicy,
        asker: Asker = ASK_ONCE,
    ) -> None:
        self._uri = uri
        self._endpoint = endpoint.rstrip("/")
        self._token = token
        self._organisation = organisation
        self._egress = egress
        self._asker = asker
        self._api = HfApi(endpoint=self._endpoint, token=token or False, library_name="bdn")
        self._errors = HubErrors(uri, anonymous=token is None)
        self._repository: _Repository | None = None

    async def resolve(self) -> Resolution:
        """The commit that the revision names now, after a check that we may read it."""
        self._repository = await self._inspect(self._uri.revision)
        return Resolution(self._repository.commit)

    async def list(self, resolution: Resolution, within: Sequence[str] = ("",)) -> AsyncIterator[UpstreamFile]:
        """The files of the commit, page by page. A resolution from elsewhere is checked for access first."""
        if self._repository is None or self._repository.commit != resolution.revision:
            self._repository = await self._inspect(resolution.revision)
        repository = self._repository
        headers = build_hf_headers(token=self._token or False, library_name="bdn")
        tree = HubTree(self._endpoint, self._uri, repository.commit, headers, self._call)
        async for files in HubListing(tree).files(within):
            for entry in files:
                yield self._file(entry, repository)

    async def locate(self, file: UpstreamFile) -> Location:
        """The address of the pinned file: of a CDN, signed and for about an hour, or of the hub itself.

        A file of one chunk is asked of the hub without another word: its redirect is followed like any other, and its
        checksum tells whether it is the right file. ``etag`` stays None: a CDN's differs from the one that the hub tells,
        and the commit in the address pins the bytes.
        """
        url = hf_hub_url(
            self._uri.repo_id,
            file.handle,
            repo_type=self._uri.kind,
            revision=file.version,
            endpoint=self._endpoint,
        )
        if file.size <= CHUNK_SIZE:
            return Location(url, self._credentials)
        metadata = await self._call(lambda: self._api.get_hf_file_metadata(url=url), path=file.path)
        if metadata.commit_hash is None:
            raise UpstreamUnavailableError(str(self._uri), "the answer does not look like a hub's (no X-Repo-Commit)")
        if metadata.size is not None and metadata.size != file.size:
            reason = f"listed with {file.size} bytes, now {metadata.size}"
            raise SourceChangedError(str(self._uri), file.path, reason)
        is_hub = _origin(metadata.location) == _origin(self._endpoint)
        return Location(metadata.location, self._credentials if is_hub else ())

    @property
    def _credentials(self) -> tuple[tuple[str, str], ...]:
        return (("Authorization", f"Bearer {self._token}"),) if self._token else ()

    async def _inspect(self, revision: str | None) -> _Repository:
        info = await self._call(lambda: self._describe(revision))
        if info.sha is None or not _COMMIT.fullmatch(info.sha):
            raise UpstreamUnavailableError(str(self._uri), "the answer does not look like a hub's (no commit)")
        if info.gated:
            # The hub describes and lists gated repositories to anybody; only this tells who may read them.
            await self._call(lambda: self._api.auth_check(self._uri.repo_id, repo_type=self._uri.kind))
        # Shared with other organisations only when the hub says in so many words that it is not private.
        return _Repository(info.sha, public=info.private is False and not info.gated)

    def _describe(self, revision: str | None) -> ModelInfo | DatasetInfo | SpaceInfo:
        # "expand" keeps the list of siblings out of the answer: megabytes for large repositories, and incomplete there
        # (huggingface_hub#3122). Spaces do not offer "gated" that way; they are small.
        match self._uri.kind:
            case "model":
                return self._api.model_info(self._uri.repo_id, revision=revision, expand=["sha", "private", "gated"])
            case "dataset":
                return self._api.dataset_info(self._uri.repo_id, revision=revision, expand=["sha", "private", "gated"])
            case "space":
                return self._api.space_info(self._uri.repo_id, revision=revision)

    def _file(self, entry: RepoFile, repository: _Repository) -> UpstreamFile:
        try:
            path = normalise_path(entry.path)
        except UnsafePathError as error:
            raise InvalidSourceError(str(self._uri), f"{self._uri} cannot become a tree of files: {error}") from error
        checksum = (
            Checksum(ChecksumKind.SHA256, entry.lfs.sha256)
            if entry.lfs
            else Checksum(ChecksumKind.GIT_BLOB, entry.blob_id)
        )
        scope = PUBLIC if repository.public else scope_of(self._organisation)
        where = ("hf", self._endpoint, self._uri.kind, self._uri.repo_id)
        identity = Identity.of(scope, *where, checksum.hex, str(entry.size))
        return UpstreamFile(path, entry.size, identity, entry.path, repository.commit, checksum)

    async def _call(self, work: Callable[[], T], path: str = "") -> T:
        """Run blocking SDK work, one request of it, in a thread. Cancelled, it leaves a thread that ends with it."""

        def once() -> T:
            # The session judges it as well, but its URLs refuse some spellings first, as if that might pass.
            self._egress.admit(urlsplit(self._endpoint).hostname or "")
            with one_attempt(self._egress):
                return work()

        async def ask() -> T:
            try:
                return await asyncio.to_thread(once)
            except SDK_ERRORS as error:
                raise self._errors.translate(error, path) from error

        return await self._asker.ask(self._endpoint, ask)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


@asynccontextmanager
async def open_hugging_face(
    uri: HuggingFaceUri,
    *,
    sign_in: SignIn | None,
    organisation: str,
    ambient_credentials: bool,
    settings: UpstreamSettings,
    clock: Callable[[], float] = time.time,  # noqa: ARG001 - tokens of a hub do not end
    asker: Asker = ASK_ONCE,
) -> AsyncIterator[HuggingFaceSource]:
    """The source, without a request yet; the arguments are those of ``open_source``."""
    token = settings.hf_token if ambient_credentials else None
    if isinstance(sign_in, Secret):
        token = hugging_face_token(sign_in)
    await asyncio.to_thread(warm_up)
    yield HuggingFaceSource(
        uri,
        endpoint=settings.hf_endpoint,
        token=token,
        organisation=organisation,
        egress=settings.egress,
        asker=asker,
    )
