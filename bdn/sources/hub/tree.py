"""The tree of a repository, page by page: one call is one request, so that a page that fails is all that is asked again.

The SDK's own listing is a generator over all pages, which a failure ends: to go on means to begin again.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
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
