"""Listings of whole commits of a hub, which the cache of the hub's client needs, also where patterns selected a part.

A mirror keeps what it listed. If that was a part of the commit, the whole is listed at the first request and kept
instead.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bdn.core.chunk import Digest, MalformedDocumentError
from bdn.core.errors import InvalidRequestError, NotFoundError
from bdn.core.listing import ListedFile, ListingRoot, listed_in
from bdn.core.source.upstream import ChecksumKind, Listing, Resolution
from bdn.core.source.uri import HuggingFaceUri, SourceUri
from bdn.mirror.chunks.writer import SetWriter
from bdn.mirror.db import chunks, manifests, mirrors
from bdn.mirror.db.chunks import SetEndedError
from bdn.mirror.db.database import Database
from bdn.mirror.db.manifests import DocumentDamagedError
from bdn.mirror.db.mirrors import listing_owner
from bdn.mirror.db.tables import MirrorSourceRow
from bdn.mirror.ingest.survey import Surveyor
from bdn.mirror.ingest.worker import write_listing
from bdn.wire.mirror_schema import HubFile, WeightsSourceBody
from bdn.wire.shapes import Page

logger = logging.getLogger(__name__)
_ATTEMPTS: Final = 5  # another request may list the same commit, or a mirror take the listing, at the same moment


@dataclass(frozen=True)
class CommitTrees:
    database: Database
    surveyor: Surveyor

    async def page(
        self, source: SourceUri, organisation: str, team: str | None, number: int, *, is_held: bool
    ) -> Page[HubFile]:
        """Some files of a commit that was mirrored for the organisation or team, in path order; ``number`` from 0.

        Sends requests to the hub if only a part of the commit was listed, with the credentials of that mirror;
        with ``is_held`` never.

        Raises ``NotFoundError``: the commit was not mirrored; or with ``is_held``, no listing of the whole is held.
        """
        if not isinstance(source, HuggingFaceUri) or source.commit is None:
            raise InvalidRequestError(
                f"{source} is not a commit of a hub's repository; name one: hf://org/model@<commit>"
            )
        pages = await self._pages(source, source.commit, organisation, team, is_held=is_held)
        found = pages[number : number + 1]
        following = str(number + 1) if number + 1 < len(pages) else None
        content = [await asyncio.to_thread(manifests.document, self.surveyor.store, page) for page in found]
        return Page[HubFile](items=list(map(_hub_file, listed_in(content))), next_cursor=following)

    async def files(
        self, source: HuggingFaceUri, organisation: str, *, is_held: bool = True
    ) -> dict[str, ListedFile] | None:
        """All files of a commit by path, as ``page``; None instead of ``NotFoundError``."""
        try:
            pages = await self._pages(source, source.commit or "", organisation, None, is_held=is_held)
        except NotFoundError:
            return None
        return await asyncio.to_thread(self._read, pages)

    def _read(self, pages: Sequence[Digest]) -> dict[str, ListedFile]:
        contents = (manifests.document(self.surveyor.store, page) for page in pages)
        return {file.path: file for file in listed_in(contents)}

    async def _pages(
        self, uri: HuggingFaceUri, commit: str, organisation: str, team: str | None, *, is_held: bool
    ) -> Sequence[Digest]:
        repository = str(uri).partition("@")[0]
        for _ in range(_ATTEMPTS):
            async with self.database.read() as session:
                rows = await mirrors.ready_at(session, organisation, team, repository, commit)
            for row in rows:
                if row.listing is not None and (root := await self._root(Digest(row.listing))) and root.is_whole:
                    return root.pages
            if not rows:
                raise NotFoundError(f"a mirror of {uri}")
            if is_held:
                raise NotFoundError(
                    f"a listing of all files of {uri} (only a part was listed; ask again without --offline, or held)"
                )
            await self._list(rows[0], commit)
        raise NotFoundError(f"a mirror of {uri}, which is being evicted")

    async def _root(self, listing: Digest) -> ListingRoot | None:
        try:
            return ListingRoot.parse(await asyncio.to_thread(manifests.document, self.surveyor.store, listing))
        except (DocumentDamagedError, MalformedDocumentError) as error:
            logger.info(
                "cannot read a listing; requesting it again", extra={"listing": listing.hex, "error": str(error)}
            )
            return None

    async def _list(self, row: MirrorSourceRow, commit: str) -> None:
        """List the whole commit, and keep that as the listing of the row. Does nothing if the row is gone meanwhile."""
        wanted = WeightsSourceBody.model_validate(row.request).to_core()
        async with self.database.read() as session:
            team = (await mirrors.get(session, row.mirror_id, row.organisation)).row.team or None
        async with self.surveyor.open(wanted, row.organisation, row.mirror_id, commit, team) as source:
            tree = await self.surveyor.tree(wanted, source, Resolution(commit))
        owner = listing_owner(row.mirror_id, row.position)
        async with self.database.write() as session:
            set_id = await chunks.of(session, chunks.begin, owner)
        writer = SetWriter(self.database, self.surveyor.store, set_id, row.organisation)
        try:
            root = await asyncio.to_thread(_write, tree, writer)
            async with self.database.write() as session:
                published = await manifests.lock(session, [row.manifest or ""])  # so its listing is not dropped now
                place = row.mirror_id, row.position
                if not published or not await mirrors.replace_listing(session, *place, root.hex):
                    await chunks.of(session, chunks.end, [set_id], chunks.NO_GRACE)
        except SetEndedError:  # another request was faster
            return


def _write(tree: Listing, writer: SetWriter) -> Digest:
    return write_listing(tree, writer, is_whole=True)


def _hub_file(file: ListedFile) -> HubFile:
    is_lfs = file.checksum_kind == ChecksumKind.SHA256
    return HubFile(
        path=file.path.encode(errors="replace").decode(),  # a lone surrogate of a hostile hub
        size=file.size,
        blob_id=file.git_name or "",
        lfs_sha256=file.checksum if is_lfs else None,
    )
