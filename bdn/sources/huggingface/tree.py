"""The tree of a repository, page by page: one call is one request, so that a page that fails is all that is asked again.

The SDK's own listing is a generator over all pages, which a failure ends: to go on means to begin again.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import quote

from huggingface_hub import get_session, hf_raise_for_status
from huggingface_hub.errors import RemoteEntryNotFoundError
from huggingface_hub.hf_api import RepoFile

from bdn.core.source.uri import HuggingFaceUri

_NAME: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # SHA-1 of a git blob, or SHA-256 of a file in LFS


@dataclass(frozen=True, slots=True)
class TreePage:
    """The files of one page, the paths of the folders on it, and where the next one is, None at the end."""

    files: tuple[RepoFile, ...] = ()
    folders: tuple[str, ...] = ()
    following: str | None = None


def first_page(endpoint: str, uri: HuggingFaceUri, commit: str, folder: str = "", *, recursive: bool = True) -> str:
    """The address of the first page of ``folder`` or of the root: of everything below it, or of what is directly in it."""
    below = f"/{quote(folder, safe='')}" if folder else ""
    return (
        f"{endpoint}/api/{uri.kind}s/{uri.repo_id}/tree/{commit}{below}?recursive={str(recursive).lower()}&expand=false"
    )


def read_page(address: str, headers: Mapping[str, str]) -> TreePage:
    """One request. Blocking; raises what the SDK raises: RemoteEntryNotFoundError for a folder that the commit lacks."""
    response = get_session().get(address, headers=dict(headers))
    hf_raise_for_status(response)
    entries = response.json()
    files = tuple(_file(entry) for entry in entries if entry["type"] == "file")
    folders = tuple(_text(entry["path"]) for entry in entries if entry["type"] == "directory")
    following = response.links.get("next", {}).get("url")
    if following == address:
        msg = "a listing goes on where it is"
        raise ValueError(msg)
    return TreePage(files, folders, following)


def _file(entry: Mapping[str, object]) -> RepoFile:
    """The SDK takes whatever stands in the answer for what should stand there."""
    file = RepoFile(**entry)  # type: ignore[no-untyped-call]
    _text(file.path)
    name = _text(file.lfs.sha256 if file.lfs else file.blob_id)
    if _NAME.fullmatch(name) is None or type(file.size) is not int or file.size < 0:
        msg = "an entry that cannot be a file"
        raise ValueError(msg)
    return file


def _text(value: object) -> str:
    if not isinstance(value, str):
        msg = f"expected a text, not {type(value).__name__}"
        raise TypeError(msg)
    return value


class HubTree:
    """The tree of one commit. ``call`` runs each request in a thread and maps its failure."""

    def __init__(
        self,
        endpoint: str,
        uri: HuggingFaceUri,
        commit: str,
        headers: Mapping[str, str],
        call: Callable[[Callable[[], TreePage]], Awaitable[TreePage]],
    ) -> None:
        self._first_page = partial(first_page, endpoint, uri, commit)
        self._headers = headers
        self._call = call

    async def first(self, folder: str, *, recursive: bool) -> TreePage:
        """The first page of a folder; an empty one where the commit has no such folder."""

        def read() -> TreePage:
            try:
                return read_page(self._first_page(folder, recursive=recursive), self._headers)
            except RemoteEntryNotFoundError:
                if not folder:
                    raise
                return TreePage()

        return await self._call(read)

    async def next(self, address: str) -> TreePage:
        """A page that another one named."""
        return await self._call(lambda: read_page(address, self._headers))


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
class HubListing:
    """The files of a commit whose paths begin with one of ``within``, page by page, each file once."""

    tree: HubTree

    async def files(self, within: Sequence[str]) -> AsyncIterator[Sequence[RepoFile]]:
        """One page after the other is asked for, when the one before it is used up."""
        folders = folders_of(within)
        if len(folders) > 1:
            # Most repositories fit one page, which is one request; their folders one by one would be several.
            page = await self.tree.first(nearest_above(folders), recursive=True)
            if page.following is None:
                yield [file for file in page.files if any(folder.wants(file.path) for folder in folders)]
                return
        for folder in folders:
            pages = self._part(folder) if folder.stems else self._whole(folder.path)
            async for files in pages:
                yield files

    async def _whole(self, path: str) -> AsyncIterator[Sequence[RepoFile]]:
        async for page in self._pages(path, recursive=True):
            yield page.files

    async def _part(self, folder: Folder) -> AsyncIterator[Sequence[RepoFile]]:
        """What in a folder begins as it should: first the files directly in it, then all that is below its folders."""
        deeper: list[str] = []
        async for page in self._pages(folder.path, recursive=False):
            deeper += filter(folder.wants, page.folders)
            yield [file for file in page.files if folder.wants(file.path)]
        if len(deeper) <= FOLDERS_ASKED_FOR:
            for path in deeper:
                async for files in self._whole(path):
                    yield files
        else:
            async for files in self._whole(folder.path):
                yield [file for file in files if folder.wants(file.path) and not folder.holds(file.path)]

    async def _pages(self, path: str, *, recursive: bool) -> AsyncIterator[TreePage]:
        page = await self.tree.first(path, recursive=recursive)
        yield page
        while page.following is not None:
            page = await self.tree.next(page.following)
            yield page
