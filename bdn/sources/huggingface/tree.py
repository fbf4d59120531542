"""The tree of one commit of a hub's repository, page by page and narrowed to folders; and pages of listings of any kind."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from huggingface_hub import get_session, hf_raise_for_status
from huggingface_hub.errors import RemoteEntryNotFoundError
from huggingface_hub.hf_api import RepoFile

from bdn.sources.huggingface.session import origin_of

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


def read_entries(
    address: str, headers: Mapping[str, str], endpoint: str
) -> tuple[Sequence[Mapping[str, object]], str | None]:
    """The entries of one page as the hub sent them, and the address of the next page. One request. Blocking.

    Raises the SDK's errors.
    """
    response = get_session().get(address, headers=dict(headers))
    hf_raise_for_status(response)
    entries: Sequence[Mapping[str, object]] = response.json()
    following = response.links.get("next", {}).get("url")
    if following is not None:
        following = at_endpoint(urljoin(address, following), endpoint)
    if following == address:
        raise ValueError("a page of a listing names itself as the next page")
    return entries, following


def read_page(address: str, headers: Mapping[str, str], endpoint: str) -> TreePage:
    """One request. Blocking. Raises the SDK's errors: RemoteEntryNotFoundError for a folder that the commit lacks."""
    entries, following = read_entries(address, headers, endpoint)
    files = tuple(_file(entry) for entry in entries if entry["type"] == "file")
    folders = tuple(_text(entry["path"]) for entry in entries if entry["type"] == "directory")
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
class HubListing:
    """A folder (``""``: the root): everything below it, or with ``stems`` only names that begin with a stem."""

    path: str
    stems: tuple[str, ...]

    def wants(self, path: str) -> bool:
        below = f"{self.path}/" if self.path else ""
        return path.startswith(below) and (not self.stems or path[len(below) :].startswith(self.stems))

    def holds(self, path: str) -> bool:
        """Whether this path is directly in the folder, not deeper."""
        return path.rpartition("/")[0] == self.path


def folders_of(within: Sequence[str]) -> tuple[HubListing, ...]:
    """Folders such that each path beginning with one of ``within`` is wanted by exactly one of them."""
    stems: dict[str, list[str]] = {}
    for prefix in within:
        folder, _, stem = prefix.rpartition("/")
        if not prefix.startswith("/") and (not folder or not _NO_SEGMENTS.intersection(folder.split("/"))):
            stems.setdefault(folder, []).append(stem)
    return tuple(HubListing(path, () if "" in found else tuple(found)) for path, found in stems.items())


def nearest_above(folders: Sequence[HubListing]) -> str:
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

    async def _part(self, folder: HubListing) -> AsyncIterator[Sequence[RepoFile]]:
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
