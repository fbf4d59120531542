"""Lists a part of a repository for as few requests as can be told before it is known."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from huggingface_hub.hf_api import RepoFile

from bdn.sources.hub.folders import Folder, folders_of, nearest_above
from bdn.sources.hub.tree import HubTree, TreePage

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
