"""Repositories of a Hugging Face hub, asked through the real client and read from the hub's own addresses.

Nothing is downloaded by the client and its shared cache is never used: on 401, 403 and 5xx it would silently serve what
it has, which is no proof of access.
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
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined] # that is where it is documented

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
    """One repository. One request resolves it, two if it is gated, and each 1000 entries of its tree cost another.

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
        """The commit that the revision names now, after a check that we may read it."""
        self._repository = await self._inspect(self._uri.revision)
        return Resolution(self._repository.commit)

    async def list(self, resolution: Resolution, within: Sequence[str] = ("",)) -> AsyncIterator[UpstreamFile]:
        """The files of the commit, page by page. A resolution from elsewhere is checked for access first."""
        if self._repository is None or self._repository.commit != resolution.revision:
            self._repository = await self._inspect(resolution.revision)
        repository = self._repository
        headers = build_hf_headers(token=self._token or False, library_name="bdn")
        root = f"{self._endpoint}/api/{self._uri.kind}s/{self._uri.repo_id}/tree/{repository.commit}"
        async for files in HubTree(root, headers, self._endpoint, self._call).files(within):
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
        # "expand" keeps the list of siblings out of the answer: megabytes for large repositories, and incomplete there
        # (huggingface_hub#3122). Spaces do not offer "gated" that way; they are small.
        expand: Any = None if kind == "space" else ["sha", "private", "gated"]
        info = await self._call(lambda: self._api.repo_info(repo_id, revision=revision, repo_type=kind, expand=expand))
        if info.sha is None or not COMMIT.fullmatch(info.sha):
            raise UpstreamUnavailableError(str(self._uri), "the answer does not look like a hub's (no commit)")
        if info.gated:
            # The hub describes and lists gated repositories to anybody; only this tells who may read them.
            await self._call(lambda: self._api.auth_check(repo_id, repo_type=kind))
        # Shared with other organisations only when the hub says in so many words that it is not private.
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
        return UpstreamFile(listed_path(entry.path), entry.size, identity, entry.path, repository.commit, checksum)

    async def _call(self, work: Callable[[], T], path: str = "") -> T:
        """Run blocking SDK work, one request of it, in a thread. Cancelled, it leaves a thread that ends with it."""
        egress = self._context.settings.egress

        def once() -> T:
            # The session judges it as well, but its URLs refuse some spellings first, as if that might pass.
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
    """The source, without a request yet."""
    token = context.settings.hf_token if context.ambient_credentials else None
    if isinstance(context.sign_in, Secret):
        token = hugging_face_token(context.sign_in)
    await asyncio.to_thread(warm_up)
    yield HuggingFaceSource(uri, context, token)


_NAME: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # SHA-1 of a git blob, or SHA-256 of a file in LFS


@dataclass(frozen=True, slots=True)
class TreePage:
    """The files of one page, the paths of the folders on it, and where the next one is, None at the end."""

    files: tuple[RepoFile, ...] = ()
    folders: tuple[str, ...] = ()
    following: str | None = None


def at_endpoint(address: str, endpoint: str) -> str:
    """The same path and query at the configured endpoint, below its own path if it has one.

    A mirror of the hub passes the hub's ``Link`` headers on, which name the hub. What the endpoint's token may be sent to is the
    endpoint.
    """
    here, there = urlsplit(endpoint), urlsplit(address)
    if origin_of(address) == origin_of(endpoint):
        return address
    path = there.path if there.path.startswith(f"{here.path}/") else f"{here.path}{there.path}"
    return urlunsplit((here.scheme, here.netloc, path, there.query, ""))


def read_page(address: str, headers: Mapping[str, str], endpoint: str) -> TreePage:
    """One request. Blocking; raises what the SDK raises: RemoteEntryNotFoundError for a folder that the commit lacks."""
    response = get_session().get(address, headers=dict(headers))
    hf_raise_for_status(response)
    entries = response.json()
    files = tuple(_file(entry) for entry in entries if entry["type"] == "file")
    folders = tuple(_text(entry["path"]) for entry in entries if entry["type"] == "directory")
    following = response.links.get("next", {}).get("url")
    if following is not None:
        following = at_endpoint(urljoin(address, following), endpoint)
    if following == address:
        raise ValueError("a listing goes on where it is")
    return TreePage(files, folders, following)


def _file(entry: Mapping[str, object]) -> RepoFile:
    """The SDK takes whatever stands in the answer for what should stand there."""
    file = RepoFile(**entry)  # type: ignore[no-untyped-call]
    _text(file.path)
    name = _text(file.lfs.sha256 if file.lfs else file.blob_id)
    if _NAME.fullmatch(name) is None or type(file.size) is not int or file.size < 0:
        raise ValueError("an entry that cannot be a file")
    return file


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, not {type(value).__name__}")
    return value


_NO_SEGMENTS = {"", ".", ".."}  # no normalised path has them


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder, ``""`` for the root. With ``stems`` only what begins with one of them in it, otherwise everything below."""

    path: str
    stems: tuple[str, ...]

    def wants(self, path: str) -> bool:
        """Whether this path in the folder, or below it, begins as it should."""
        below = f"{self.path}/" if self.path else ""
        return path.startswith(below) and (not self.stems or path[len(below) :].startswith(self.stems))

    def holds(self, path: str) -> bool:
        """Whether this path is directly in the folder, not deeper."""
        return path.rpartition("/")[0] == self.path


def folders_of(within: Sequence[str]) -> tuple[Folder, ...]:
    """Every path that begins with one of ``within`` is wanted by exactly one of these."""
    stems: dict[str, list[str]] = {}
    for prefix in within:
        folder, _, stem = prefix.rpartition("/")
        if not prefix.startswith("/") and (not folder or not _NO_SEGMENTS.intersection(folder.split("/"))):
            stems.setdefault(folder, []).append(stem)
    return tuple(Folder(path, () if "" in found else tuple(found)) for path, found in stems.items())


def nearest_above(folders: Sequence[Folder]) -> str:
    """The folder that holds all of them."""
    first, last = (found(folder.path.split("/") for folder in folders) for found in (min, max))
    shared = 0
    while shared < min(len(first), len(last)) and first[shared] == last[shared]:
        shared += 1
    return "/".join(first[:shared])


FOLDERS_ASKED_FOR: Final = 16  # of more, the folder that holds them all is listed


@dataclass(frozen=True)
class HubTree:
    """The tree of one commit. ``root`` is its address; ``call`` runs each request in a thread and maps its failure."""

    root: str
    headers: Mapping[str, str]
    endpoint: str
    call: Callable[[Callable[[], TreePage]], Awaitable[TreePage]]

    async def files(self, within: Sequence[str]) -> AsyncIterator[Sequence[RepoFile]]:
        """The files whose paths begin with one of ``within``, page by page, each file once.

        One page after the other is asked for, when the one before it is used up.
        """
        folders = folders_of(within)
        if len(folders) > 1:
            # Most repositories fit one page, which is one request; their folders one by one would be several.
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

    async def _part(self, folder: Folder) -> AsyncIterator[Sequence[RepoFile]]:
        """What in a folder begins as it should: first the files directly in it, then all that is below its folders."""
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
        """Of everything below the folder, or of what is directly in it; empty where the commit has no such folder."""
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
