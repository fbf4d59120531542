"""One file of a manifest by an address that is signed: for who knows nothing of chunks, such as a browser or a loader of checkpoints."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, Final, TypeVar

from blake3 import blake3

from bdn.core.chunk import ByteRange, Digest, FileEntry, FileLayout, Manifest
from bdn.core.errors import NotFoundError, StoreUnavailableError
from bdn.core.store import ChunkStore
from bdn.mirror.db import contents, mirrors
from bdn.mirror.db.database import Database
from bdn.mirror.db.waiting import SharedReads
from bdn.transfer.fair_limit import FairLimit
from bdn.wire.grants import FileGrant, GrantSigner, GrantVerifier, file_url
from bdn.wire.location_schema import FileAddress
from bdn.wire.shapes import moment

_PIECE: Final = 1024 * 1024
_Asked = TypeVar("_Asked")
_Read = TypeVar("_Read")
_FILES_KEPT: Final = 200_000  # of parsed manifests together, about 60 MB


@dataclass(frozen=True, slots=True)
class Part:
    """Some bytes of a file: ``range`` of an object of the store."""

    chunk: Digest
    range: ByteRange


def parts_of(layout: FileLayout, wanted: ByteRange) -> Iterator[Part]:
    """Where these bytes of a file lie, in their order."""
    if layout.slice is not None:
        offset = layout.slice.offset
        yield Part(layout.slice.slab, ByteRange(offset + wanted.start, offset + wanted.stop))
        return
    for chunk in layout.placed():
        start, stop = max(wanted.start, chunk.range.start), min(wanted.stop, chunk.range.stop)
        if start < stop:
            yield Part(chunk.digest, ByteRange(start - chunk.range.start, stop - chunk.range.start))


@dataclass(frozen=True)
class OpenedFile:
    """A file that this organisation may read, and from where."""

    entry: FileEntry
    layout: FileLayout
    store: ChunkStore
    organisation: str
    threads: Executor

    async def begin(self, wanted: ByteRange) -> AsyncIterator[bytes]:
        """These bytes, a piece at a time; the first chunk is looked at before this returns.

        Each chunk is compared with its name before any of it is given away: nobody behind this does. ``StoreUnavailableError``.
        """
        parts = list(parts_of(self.layout, wanted))
        first = await self._in_thread(self._open, parts[0])
        return self._pieces(first, parts)

    async def _pieces(self, file: BinaryIO, parts: Sequence[Part]) -> AsyncIterator[bytes]:
        for position, part in enumerate(parts):
            if position:
                file = await self._in_thread(self._open, part)
            with file:
                left = part.range.size
                while left:
                    piece = await self._in_thread(file.read, min(left, _PIECE))
                    if not piece:
                        raise StoreUnavailableError(f"chunk {part.chunk} is shorter than it was")
                    left -= len(piece)
                    yield piece

    async def _in_thread(self, read: Callable[[_Asked], _Read], asked: _Asked) -> _Read:
        return await asyncio.get_running_loop().run_in_executor(self.threads, read, asked)

    def _open(self, part: Part) -> BinaryIO:
        try:
            file = self.store.open(part.chunk, reader=self.organisation)
        except NotFoundError as error:
            raise StoreUnavailableError(f"it lost {error.what} of {self.entry.path!r}") from error
        with ExitStack() as stack:
            stack.push(file)
            self._check(file, part)
            file.seek(part.range.start)
            stack.pop_all()
        return file

    def _check(self, file: BinaryIO, part: Part) -> None:
        hasher = blake3()
        while piece := file.read(_PIECE):
            hasher.update(piece)
        if hasher.hexdigest() != part.chunk.hex:
            raise StoreUnavailableError(f"chunk {part.chunk} of {self.entry.path!r} is damaged")


@dataclass
class ServedFiles:
    """The service behind ``/files``, which reads the store in ``threads``. Addresses are valid for ``seconds``, on every replica with the keys of grants."""

    database: Database
    store: ChunkStore
    signer: GrantSigner
    verifier: GrantVerifier
    seconds: int
    threads: Executor
    _kept: dict[str, dict[str, FileEntry]] = field(default_factory=dict)  # by manifest, least recently used first
    _parses: SharedReads[tuple[str, str], dict[str, FileEntry]] = field(default_factory=partial(SharedReads, math.inf))
    _parsing: FairLimit = field(default_factory=lambda: FairLimit(1))  # a parse of 60,000 files takes 40 MB

    async def addresses(
        self, manifest: Digest, paths: Sequence[str], organisation: str, team: str | None = None
    ) -> list[FileAddress]:
        """Of files of a manifest that the organisation, or the team, may read. ``NotFoundError``: it, or one of them, is not there."""
        entries = await self._entries(manifest, organisation, team)
        expires_at, found = time.time() + self.seconds, []
        for path in paths:
            if (entry := entries.get(path)) is None:
                raise NotFoundError(f"file {path!a} of manifest {manifest}")
            grant = FileGrant(organisation, manifest, path, expires_at)
            url = file_url("", grant, self.signer.sign_file(grant))
            found.append(FileAddress(path=path, url=url, size_bytes=entry.size, expires_at=moment(expires_at)))
        return found

    async def opened(self, manifest: Digest, path: str, signature: str) -> OpenedFile:
        """The file that the signature is for.

        Raises:
            GrantInvalidError, GrantExpiredError: it is none, or not any more.
            NotFoundError: it is another file's, or its organisation may not read the manifest any more.
            StoreUnavailableError: some of it is damaged.
        """
        grant = self.verifier.verify_file(signature, now=time.time())
        if not grant.allows(manifest, path):
            raise NotFoundError(f"file {path!a} of manifest {manifest}")
        entry = (await self._entries(manifest, grant.organisation)).get(path)
        if entry is None:
            raise NotFoundError(f"file {path!a} of manifest {manifest}")
        async with self.database.read() as session:
            layout = await contents.layout_of(session, entry.digest.hex, grant.organisation)
        if layout is None:
            raise StoreUnavailableError(f"{path!r} of manifest {manifest} is damaged")
        return OpenedFile(entry, layout, self.store, grant.organisation, self.threads)

    async def _entries(self, manifest: Digest, organisation: str, team: str | None = None) -> dict[str, FileEntry]:
        """By path. What was read lately is kept: clients ask for eight bytes, and then for a header."""
        async with self.database.read() as session:
            if not await mirrors.may_read(session, organisation, manifest.hex, team):
                raise NotFoundError(f"manifest {manifest}")
        known = self._kept.pop(manifest.hex, None)
        if known is None:  # manifests are immutable: one parse is for all that wait for it
            read = self._parses.of((organisation, manifest.hex), partial(self._parsed, manifest, organisation))
            known = await read.get()
        self._kept.pop(manifest.hex, None)
        self._kept[manifest.hex] = known
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _FILES_KEPT:
            del self._kept[next(iter(self._kept))]
        return known

    async def _parsed(self, manifest: Digest, organisation: str) -> dict[str, FileEntry]:
        async with self._parsing.place(organisation):
            if (known := self._kept.get(manifest.hex)) is not None:  # another organisation has it as well
                return known
            async with self.database.read() as session:
                row = await contents.manifest(session, manifest.hex)
            if row is None:
                raise NotFoundError(f"manifest {manifest}")
            parsed = await asyncio.to_thread(Manifest.parse, row.canonical)
            return {entry.path: entry for entry in parsed.files}
