"""Repositories of a Hugging Face hub: listings through the hub's client, bytes from the hub's own addresses.

The client downloads nothing and its shared cache is never used: on 401, 403 and 5xx it would silently serve cached
files, which do not prove access.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from huggingface_hub import HfApi, get_session, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import RemoteEntryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined] # documented there

from bdn.core.errors import SourceChangedError, UpstreamUnavailableError
from bdn.core.source.upstream import Checksum, ChecksumKind, Identity, Location, Resolution, UpstreamFile, listed_path
from bdn.core.source.uri import COMMIT, HuggingFaceUri
from bdn.core.store import PUBLIC, scope_of
from bdn.sources.huggingface.session import SDK_ERRORS, one_attempt, origin_of, translate, warm_up
from bdn.sources.sign_in import Secret, SourceContext, hugging_face_token

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Repository:
    commit: str
    public: bool


class HuggingFaceSource:
    """One repository. Resolving costs one request, two if it is gated; a listing costs one per 1000 entries.

    ``token`` None reads anonymously.
    """

    def __init__(self, uri: HuggingFaceUri, context: SourceContext, token: str | None) -> None:
        self._uri = uri
        self._context = context
        self._endpoint = context.settings.hf_endpoint.rstrip("/")
        self._token = token
        self._api = HfApi(endpoint=self._endpoint, token=token or False, library_name="bdn")
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
        headers = build_hf_headers(token=self._token or False, library_name="bdn")
        root = f"{self._endpoint}/api/{self._uri.kind}s/{self._uri.repo_id}/tree/{repository.commit}"
        async for files in HubTree(root, headers, self._endpoint, self._call).files(within):
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
            endpoint=self._endpoint,
        )
        if file.is_one_chunk:
            return Location(url, self._credentials)
        metadata = await self._call(lambda: self._api.get_hf_file_metadata(url=url), path=file.path)
        if metadata.commit_hash is None:
            raise UpstreamUnavailableError(str(self._uri), "the answer does not look like a hub's (no X-Repo-Commit)")
        if metadata.size is not None and metadata.size != file.size:
            reason = f"listed with {file.size} bytes, now {metadata.size}"
            raise SourceChangedError(str(self._uri), file.path, reason)
        is_hub = origin_of(metadata.location) == origin_of(self._endpoint)
        return Location(metadata.location, self._credentials if is_hub else ())

    @property
    def _credentials(self) -> tuple[tuple[str, str], ...]:
        return (("Authorization", f"Bearer {self._token}"),) if self._token else ()

    async def _inspect(self, revision: str | None) -> _Repository:
        repo_id, kind = self._uri.repo_id, self._uri.kind
        # "expand" omits the list of siblings from the answer: megabytes for large repositories, and incomplete there
        # (huggingface_hub#3122). Spaces do not offer "gated" that way; they are small.
        expand: Any = None if kind == "space" else ["sha", "private", "gated"]
        info = await self._call(lambda: self._api.repo_info(repo_id, revision=revision, repo_type=kind, expand=expand))
        if info.sha is None or not COMMIT.fullmatch(info.sha):
            raise UpstreamUnavailableError(str(self._uri), "the answer does not look like a hub's (no commit)")
        if info.gated:
            # The hub describes and lists gated repositories to any caller; only this request checks the token's access.
            await self._call(lambda: self._api.auth_check(repo_id, repo_type=kind))
        # Shared with other organisations only if the hub explicitly says that it is not private.
        return _Repository(info.sha, public=info.private is False and not info.gated)

    def _file(self, entry: RepoFile, repository: _Repository) -> UpstreamFile:
        checksum = (
            Checksum(ChecksumKind.SHA256, entry.lfs.sha256)
            if entry.lfs
            else Checksum(ChecksumKind.GIT_BLOB, entry.blob_id)
        )
        scope = PUBLIC if repository.public else scope_of(self._context.reader)
        where = ("hf", self._endpoint, self._uri.kind, self._uri.repo_id)
        identity = Identity.of(scope, *where, checksum.hex, str(entry.size))
        return UpstreamFile(
            listed_path(entry.path), entry.size, identity, entry.path, repository.commit, checksum, entry.blob_id
        )

    async def _call(self, work: Callable[[], T], path: str = "") -> T:
        """Run one blocking request of the SDK in a thread. After a cancellation the thread ends with its request."""
        egress = self._context.settings.egress

        def once() -> T:
            # The session checks the host too, but its URLs reject some spellings first, with an error that looks
            # transient.
            egress.admit(urlsplit(self._endpoint).hostname or "")
            with one_attempt(egress, self._endpoint):
                return work()

        async def ask() -> T:
            try:
                return await asyncio.to_thread(once)
            except SDK_ERRORS as error:
                raise translate(error, self._uri, path, anonymous=self._token is None) from error

        return await self._context.asker.ask(self._endpoint, ask)


@asynccontextmanager
async def open_hugging_face(uri: HuggingFaceUri, context: SourceContext) -> AsyncIterator[HuggingFaceSource]:
    token = context.settings.hf_token if context.ambient_credentials else None
    if isinstance(context.sign_in, Secret):
        token = hugging_face_token(context.sign_in)
    await asyncio.to_thread(warm_up)
    yield HuggingFaceSource(uri, context, token)


_NAME: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # SHA-1 of a git blob, or SHA-256 of a file in LFS


@dataclass(frozen=True, slots=True)
class TreePage:
    """The files of one page, the paths of its folders, and the address of the next page, None on the last one."""

    files: tuple[RepoFile, ...] = ()
    folders: tuple[str, ...] = ()
    following: str | None = None


def at_endpoint(address: str, endpoint: str) -> str:
    """The same path and query at the configured endpoint, below the endpoint's own path if it has one.

    A mirror of the hub passes on the hub's ``Link`` headers, which name the hub. The token may go to the endpoint
    alone.
    """
    here, there = urlsplit(endpoint), urlsplit(address)
    if origin_of(address) == origin_of(endpoint):
        return address
    path = there.path if there.path.startswith(f"{here.path}/") else f"{here.path}{there.path}"
    return urlunsplit((here.scheme, here.netloc, path, there.query, ""))


def read_page(address: str, headers: Mapping[str, str], endpoint: str) -> TreePage:
    """One request. Blocking. Raises the SDK's errors: RemoteEntryNotFoundError for a folder that the commit lacks."""
    response = get_session().get(address, headers=dict(headers))
    hf_raise_for_status(response)
    entries = response.json()
    files = tuple(_file(entry) for entry in entries if entry["type"] == "file")
    folders = tuple(_text(entry["path"]) for entry in entries if entry["type"] == "directory")
    following = response.links.get("next", {}).get("url")
    if following is not None:
        following = at_endpoint(urljoin(address, following), endpoint)
    if following == address:
        raise ValueError("a page of a listing names itself as the next page")
    return TreePage(files, folders, following)


def _file(entry: Mapping[str, object]) -> RepoFile:
    """The SDK does not check types, so they are checked here."""
    file = RepoFile(**entry)  # type: ignore[no-untyped-call]
    _text(file.path)
    names = [_text(file.blob_id), *([_text(file.lfs.sha256)] if file.lfs else [])]
    if not all(map(_NAME.fullmatch, names)) or type(file.size) is not int or file.size < 0:
        raise ValueError("an entry that cannot be a file")
    return file


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, not {type(value).__name__}")
    return value


_NO_SEGMENTS = {"", ".", ".."}  # not in any normalised path


@dataclass(frozen=True, slots=True)
class HubFolder:
    """A folder (``""``: the root): everything below it, or with ``stems`` only names that begin with a stem."""

    path: str
    stems: tuple[str, ...]

    def wants(self, path: str) -> bool:
        below = f"{self.path}/" if self.path else ""
        return path.startswith(below) and (not self.stems or path[len(below) :].startswith(self.stems))

    def holds(self, path: str) -> bool:
        """Whether this path is directly in the folder, not deeper."""
        return path.rpartition("/")[0] == self.path


def folders_of(within: Sequence[str]) -> tuple[HubFolder, ...]:
    """Folders such that each path beginning with one of ``within`` is wanted by exactly one of them."""
    stems: dict[str, list[str]] = {}
    for prefix in within:
        folder, _, stem = prefix.rpartition("/")
        if not prefix.startswith("/") and (not folder or not _NO_SEGMENTS.intersection(folder.split("/"))):
            stems.setdefault(folder, []).append(stem)
    return tuple(HubFolder(path, () if "" in found else tuple(found)) for path, found in stems.items())


def nearest_above(folders: Sequence[HubFolder]) -> str:
    """The deepest folder that contains all of them."""
    first, last = (found(folder.path.split("/") for folder in folders) for found in (min, max))
    shared = 0
    while shared < min(len(first), len(last)) and first[shared] == last[shared]:
        shared += 1
    return "/".join(first[:shared])


FOLDERS_ASKED_FOR: Final = 16  # for more, the folder that contains them all is listed


@dataclass(frozen=True)
class HubTree:
    """The tree of one commit at the address ``root``; ``call`` runs each request in a thread and maps its failure."""

    root: str
    headers: Mapping[str, str]
    endpoint: str
    call: Callable[[Callable[[], TreePage]], Awaitable[TreePage]]

    async def files(self, within: Sequence[str]) -> AsyncIterator[Sequence[RepoFile]]:
        """Yield the files whose paths begin with one of ``within``, page by page, each file once.

        A page is requested only after the caller has used up the page before it.
        """
        folders = folders_of(within)
        if len(folders) > 1:
            # Most repositories fit one page, which is one request; listing their folders one by one would be several.
            page = await self._first(nearest_above(folders), recursive=True)
            if page.following is None:
                yield [file for file in page.files if any(folder.wants(file.path) for folder in folders)]
                return
        for folder in folders:
            if folder.stems:
                async for files in self._part(folder):
                    yield files
            else:
                async for page in self._pages(folder.path, recursive=True):
                    yield page.files

    async def _part(self, folder: HubFolder) -> AsyncIterator[Sequence[RepoFile]]:
        """The wanted files of a folder: first those directly in it, then all below its wanted subfolders."""
        deeper: list[str] = []
        async for page in self._pages(folder.path, recursive=False):
            deeper += filter(folder.wants, page.folders)
            yield [file for file in page.files if folder.wants(file.path)]
        if len(deeper) <= FOLDERS_ASKED_FOR:
            for path in deeper:
                async for page in self._pages(path, recursive=True):
                    yield page.files
        else:
            async for page in self._pages(folder.path, recursive=True):
                yield [file for file in page.files if folder.wants(file.path) and not folder.holds(file.path)]

    async def _pages(self, folder: str, *, recursive: bool) -> AsyncIterator[TreePage]:
        page = await self._first(folder, recursive=recursive)
        yield page
        while page.following is not None:
            page = await self.call(partial(read_page, page.following, self.headers, self.endpoint))
            yield page

    async def _first(self, folder: str, *, recursive: bool) -> TreePage:
        """Page one of all below the folder, or of its direct entries; empty if the commit lacks the folder."""
        below = f"/{quote(folder, safe='')}" if folder else ""
        address = f"{self.root}{below}?recursive={str(recursive).lower()}&expand=false"

        def read() -> TreePage:
            try:
                return read_page(address, self.headers, self.endpoint)
            except RemoteEntryNotFoundError:
                if not folder:
                    raise
                return TreePage()

        return await self.call(read)
