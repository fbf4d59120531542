"""One file of a manifest by a signed address, for clients without chunks, such as browsers or checkpoint loaders."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import BinaryIO, Final, Generic, TypeVar

from blake3 import blake3

from bdn.core.chunk import ByteRange, Digest, FileLayout
from bdn.core.errors import NotFoundError, StoreUnavailableError
from bdn.core.manifest import PageEntry, PageRef, PlacedFile, Root, read_page
from bdn.core.store import ChunkStore
from bdn.mirror.db import manifests, mirrors
from bdn.mirror.db.database import Database
from bdn.mirror.db.waiting import SharedReads
from bdn.transfer.fair_limit import FairLimit
from bdn.wire.grants import FileGrant, GrantSigner, GrantVerifier, file_url
from bdn.wire.location_schema import FileAddress
from bdn.wire.shapes import moment

_PIECE: Final = 1024 * 1024
_Asked = TypeVar("_Asked")
_Read = TypeVar("_Read")
_Document = TypeVar("_Document")
_KEPT: Final = 200_000  # files and chunks of all cached pages, about 60 MB


@dataclass(frozen=True, slots=True)
class FilePart:
    """Some bytes of a file: ``range`` of an object of the store."""

    chunk: Digest
    range: ByteRange


def parts_of(layout: FileLayout, wanted: ByteRange) -> Iterator[FilePart]:
    """The parts that contain these bytes of a file, in their order."""
    if layout.slice is not None:
        offset = layout.slice.offset
        yield FilePart(layout.slice.slab, ByteRange(offset + wanted.start, offset + wanted.stop))
        return
    for chunk in layout.placed():
        start, stop = max(wanted.start, chunk.range.start), min(wanted.stop, chunk.range.stop)
        if start < stop:
            yield FilePart(chunk.digest, ByteRange(start - chunk.range.start, stop - chunk.range.start))


@dataclass(frozen=True)
class OpenedFile:
    """A file that this organisation may read, and the store that contains it."""

    file: PlacedFile
    store: ChunkStore
    organisation: str
    threads: Executor

    async def begin(self, wanted: ByteRange) -> AsyncIterator[bytes]:
        """These bytes, a piece at a time. The first chunk is verified before this returns.

        Each chunk is verified before any of it is sent: clients do not verify. Raises ``StoreUnavailableError``.
        """
        parts = list(parts_of(self.file.layout, wanted))
        first = await self._in_thread(self._open, parts[0])
        return self._pieces(first, parts)

    async def _pieces(self, file: BinaryIO, parts: Sequence[FilePart]) -> AsyncIterator[bytes]:
        for position, part in enumerate(parts):
            if position:
                file = await self._in_thread(self._open, part)
            with file:
                left = part.range.size
                while left:
                    piece = await self._in_thread(file.read, min(left, _PIECE))
                    if not piece:
                        raise StoreUnavailableError(f"chunk {part.chunk} is shorter than recorded")
                    left -= len(piece)
                    yield piece

    async def _in_thread(self, read: Callable[[_Asked], _Read], asked: _Asked) -> _Read:
        return await asyncio.get_running_loop().run_in_executor(self.threads, read, asked)

    def _open(self, part: FilePart) -> BinaryIO:
        try:
            file = self.store.open(part.chunk, reader=self.organisation)
        except NotFoundError as error:
            raise StoreUnavailableError(f"{error.what} of {self.file.path!r} is missing") from error
        with ExitStack() as stack:
            stack.push(file)
            self._check(file, part)
            file.seek(part.range.start)
            stack.pop_all()
        return file

    def _check(self, file: BinaryIO, part: FilePart) -> None:
        hasher = blake3()
        while piece := file.read(_PIECE):
            hasher.update(piece)
        if hasher.hexdigest() != part.chunk.hex:
            raise StoreUnavailableError(f"chunk {part.chunk} of {self.file.path!r} is damaged")


class Documents(Generic[_Document]):
    """Parsed documents of the store; beyond a weight of ``_KEPT`` the least recently used is evicted.

    One document is parsed at a time, organisations in turns: a page of 25,000 files takes 20 MB.
    """

    def __init__(self) -> None:
        self._kept: dict[Digest, tuple[_Document, int]] = {}
        self._weight = 0
        self._reads: SharedReads[tuple[str, Digest], tuple[_Document, int]] = SharedReads(math.inf)
        self._turns = FairLimit(1)

    async def get(
        self, name: Digest, organisation: str, read: Callable[[], tuple[_Document, int]], threads: Executor
    ) -> _Document:
        """The document. ``read`` returns it with its weight.

        ``read`` is called once for all requests of an organisation that wait for it.
        """

        async def in_turn() -> tuple[_Document, int]:
            async with self._turns.place(organisation):
                if (known := self._kept.get(name)) is not None:  # another organisation read it meanwhile
                    return known
                return await asyncio.get_running_loop().run_in_executor(threads, read)

        found = self._kept.get(name) or await self._reads.of((organisation, name), in_turn).get()
        if self._kept.pop(name, None) is None:
            self._weight += found[1]
        self._kept[name] = found
        while len(self._kept) > 1 and self._weight > _KEPT:
            self._weight -= self._kept.pop(next(iter(self._kept)))[1]
        return found[0]


@dataclass
class ServedFiles:
    """The service behind ``/files``, which reads the store in ``threads``.

    Addresses are valid for ``seconds``, on every replica with the same grant keys. Clients request eight bytes, and
    then a header: so roots and pages that were read lately are cached.
    """

    database: Database
    store: ChunkStore
    signer: GrantSigner
    verifier: GrantVerifier
    seconds: int
    threads: Executor
    _roots: Documents[Root] = field(default_factory=Documents)
    _pages: Documents[dict[str, PageEntry]] = field(default_factory=Documents)

    async def addresses(
        self, manifest: Digest, paths: Sequence[str], organisation: str, team: str | None = None
    ) -> list[FileAddress]:
        """Signed addresses of files of a manifest that the organisation, or the team, may read.

        Raises:
            NotFoundError: the manifest, or one of the files, does not exist.
            StoreUnavailableError: the manifest's documents are damaged.
        """
        root = await self._root(manifest, organisation, team)
        expires_at, found = time.time() + self.seconds, []
        for path in paths:
            entry = (await self._entries(manifest, root, path, organisation))[0]
            grant = FileGrant(organisation, manifest, path, expires_at)
            url = file_url("", grant, self.signer.sign(grant))
            found.append(FileAddress(path=path, url=url, size_bytes=entry.size, expires_at=moment(expires_at)))
        return found

    async def listed(
        self, manifest: Digest, start: int, stop: int, organisation: str, team: str | None = None
    ) -> list[FileAddress]:
        """``addresses`` of the manifest's files from ``start`` to ``stop``, counted in the order of their paths."""
        root, paths = await self._root(manifest, organisation, team), list[str]()
        for ref in root.pages:
            page = await self._pages.get(ref.digest, organisation, partial(self._read, ref, organisation), self.threads)
            paths += [path for path, entry in page.items() if not entry.start]  # a file may continue on later pages
            if len(paths) >= stop:
                break
        return await self.addresses(manifest, paths[start:stop], organisation, team)

    async def opened(self, manifest: Digest, path: str, signature: str) -> OpenedFile:
        """The file that the signature is for.

        Raises:
            GrantInvalidError, GrantExpiredError: the signature is invalid or expired.
            NotFoundError: the signature is for another file, or its organisation may not read the manifest any more.
            StoreUnavailableError: the manifest's documents are damaged.
        """
        grant = self.verifier.verify_as(FileGrant, signature, now=time.time())
        if not grant.allows(manifest, path):
            raise NotFoundError(f"file {path!a} of manifest {manifest}")
        root = await self._root(manifest, grant.organisation)
        first, *more = await self._entries(manifest, root, path, grant.organisation)
        whole = replace(first, chunks=tuple(chain(first.chunks, *(part.chunks for part in more))))
        return OpenedFile(whole.placed(), self.store, grant.organisation, self.threads)

    async def _root(self, manifest: Digest, organisation: str, team: str | None = None) -> Root:
        async with self.database.read() as session:
            if not await mirrors.may_read(session, organisation, manifest.hex, team):
                raise NotFoundError(f"manifest {manifest}")

        def read() -> tuple[Root, int]:
            root = manifests.root_of(self.store, manifest, organisation)
            return root, len(root.pages)

        return await self._roots.get(manifest, organisation, read, self.threads)

    async def _entries(self, manifest: Digest, root: Root, path: str, organisation: str) -> list[PageEntry]:
        """The manifest's entries of the file, in order: several for a file that continues on further pages."""
        pages = [
            await self._pages.get(ref.digest, organisation, partial(self._read, ref, organisation), self.threads)
            for ref in root.pages_of(path)
        ]
        if found := [page[path] for page in pages if path in page]:
            return found
        raise NotFoundError(f"file {path!a} of manifest {manifest}")

    def _read(self, ref: PageRef, organisation: str) -> tuple[dict[str, PageEntry], int]:
        entries = read_page(manifests.page(self.store, ref, organisation))
        return {entry.path: entry for entry in entries}, sum(1 + len(entry.chunks) for entry in entries)
