"""Resolve, list, select, diff: what mirroring a source would mean, by metadata alone.

What the patterns cannot select from is not listed.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import compress, islice
from operator import attrgetter
from typing import Final

from bdn.core.chunk import (
    Digest,
    FileEntry,
    ManifestDocument,
    ManifestWriter,
    UnsafePathError,
    chunk_range,
    normalise_path,
    tree_problems,
)
from bdn.core.errors import InvalidSourceError, LimitExceededError, NoFilesMatchedError
from bdn.core.source.upstream import Listing, Resolution, Source, UpstreamFile
from bdn.core.source.uri import (
    BucketUri,
    CheckpointUri,
    HuggingFaceUri,
    SourceUri,
    WeightsSource,
    hint_for,
    literal_prefixes,
    select,
)
from bdn.core.store import is_small
from bdn.mirror.db import contents
from bdn.mirror.db.database import Database, ReadSession
from bdn.mirror.upstream.checkpoints import CheckpointSource, pinned
from bdn.mirror.upstream.sign_ins import SignIns
from bdn.sources.opener import open_source


@dataclass(frozen=True, slots=True)
class Survey:
    """What a source holds now, what of it is wanted, and what the store lacks.

    ``lacking`` is 1 for each of the files that has to be copied: of those with one identity, the first.
    """

    resolution: Resolution
    files: Listing
    lacking: bytes
    stored: dict[str, int]  # bytes of half-copied files by identity key
    warnings: tuple[str, ...]
    bytes_missing: int  # what has to be read from the upstream

    @property
    def bytes_total(self) -> int:
        """The size of the tree."""
        return self.files.bytes_total

    def missing(self) -> Iterator[UpstreamFile]:
        """The files that have to be copied."""
        return compress(self.files, self.lacking) if any(self.lacking) else iter(())

    def bytes_missing_of(self, file: UpstreamFile) -> int:
        """What of a missing file has to be read, when an earlier attempt stored a part of it."""
        return file.size - self.stored.get(file.identity.key, 0)


@dataclass(frozen=True)
class Surveyor:
    """Opens sources and surveys them."""

    database: Database
    sign_ins: SignIns
    limit_files: int
    limit_bytes: int
    store: BucketUri | None = None  # None: a directory, which no source can name

    def check(self, wanted: WeightsSource, organisation: str) -> None:
        """Refuse, before a worker tries, a sign-in that cannot be resolved and a source that shares objects with the store."""
        self.sign_ins.check(wanted.auth, organisation)
        self._check_outside(wanted.source)

    def _check_outside(self, uri: SourceUri) -> None:
        """Chunks of all organisations are in the store.

        The bucket's name alone decides: one bucket may have several endpoints, and on some servers also ``gs://`` and ``s3://`` addresses.
        """
        if not isinstance(uri, BucketUri) or self.store is None or uri.bucket.lower() != self.store.bucket.lower():
            return
        pairs = zip(_folders(uri), _folders(self.store), strict=False)
        if all(ours == theirs for ours, theirs in pairs):
            raise InvalidSourceError(
                str(uri),
                f"{uri} holds objects of this mirror's own store, or would if it were in the same place; a source has to be "
                "in another bucket, or in a folder beside the store",
            )

    @asynccontextmanager
    async def open(
        self,
        wanted: WeightsSource,
        organisation: str,
        job: str | None = None,
        revision: str | None = None,
        team: str | None = None,
    ) -> AsyncIterator[Source]:
        """The source with its credentials, on behalf of a job (None: a dry run); ``revision`` pins one that was resolved before.

        Of checkpoints those of ``team``; None: of all teams. Private content is that team's, or the organisation's, alone.
        """
        uri = wanted.source
        if isinstance(uri, CheckpointUri):
            yield CheckpointSource(self.database, pinned(uri, revision) if revision else uri, organisation, team)
            return
        self._check_outside(uri)
        if revision is not None and isinstance(uri, HuggingFaceUri):
            uri = replace(uri, revision=revision)
        async with open_source(uri, await self.sign_ins.context_of(wanted.auth, organisation, job, team)) as source:
            yield source

    async def survey(
        self, wanted: WeightsSource, source: Source, resolution: Resolution | None = None, *, is_again: bool = False
    ) -> Survey:
        """Look at an open source; ``resolution`` is what it was resolved to, if that has been done.

        ``is_again``: what was surveyed could not be published.

        Raises:
            NoFilesMatchedError, InvalidSourceError, LimitExceededError, or whatever the upstream's failure is.
        """
        resolution = resolution or await source.resolve()
        selected = await Selector(self.limit_files, self.limit_bytes).select(wanted, source, resolution)
        files = selected.files
        lacking, seen, bytes_missing = bytearray(), set[str](), 0
        stored: dict[str, int] = {}
        async with self.database.read() as session:
            for page in files.pages():
                known = await contents.held(session, page, is_again=is_again)
                missing = [file for file in page if file.identity.key not in known]
                stored |= await _stored(session, missing)
                for file in page:
                    key = file.identity.key
                    is_lacking = key not in known and key not in seen
                    lacking.append(is_lacking)
                    if is_lacking:
                        seen.add(key)
                        bytes_missing += file.size - stored.get(key, 0)
        return Survey(resolution, files, bytes(lacking), stored, selected.warnings, bytes_missing)


def _folders(uri: BucketUri) -> list[str]:
    """Without empty and ``.`` segments, which some servers remove from keys."""
    return [name for name in uri.prefix.split("/") if name not in ("", ".")]


async def _stored(session: ReadSession, missing: Sequence[UpstreamFile]) -> dict[str, int]:
    """Bytes of half-copied files by identity key. A small one is never half there."""
    sizes = {file.identity.key: file.size for file in missing if not is_small(file.size)}
    half = await contents.half_copied(session, list(sizes)) if sizes else {}
    return {key: sum(chunk_range(sizes[key], index).size for index in indexes) for key, indexes in half.items()}


async def contents_by_path(session: ReadSession, files: Listing) -> dict[str, tuple[int, Digest | None]]:
    """The size and the content of each file; None where the database does not know the content."""
    found: dict[str, tuple[int, Digest | None]] = {}
    for page in files.pages():
        known = await contents.known(session, [file.identity.key for file in page])
        found.update((file.path, (file.size, known.get(file.identity.key))) for file in page)
    return found


async def manifest_of(session: ReadSession, files: Listing) -> ManifestDocument | None:
    """The manifest of these files, as far as the database knows all their contents; None otherwise."""
    writer = ManifestWriter()
    for page in (await asyncio.to_thread(_by_path, files)).pages():
        known = await contents.known(session, [file.identity.key for file in page])
        try:
            writer.add([FileEntry(file.path, file.size, known[file.identity.key]) for file in page])
        except KeyError:
            return None
    return await asyncio.to_thread(writer.finish)


def _by_path(files: Listing) -> Listing:
    """Most upstreams list in the order of paths; otherwise this takes 600 MB for a million files."""
    return files if files.is_sorted else Listing(sorted(files, key=attrgetter("path")))


_EVERYTHING: Final = ("",)
_MOST_PROBLEMS: Final = 10  # named in one error


@dataclass(frozen=True, slots=True)
class Selected:
    """The wanted files, in the order of the listing, and a warning for each pattern that matched nothing."""

    files: Listing
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Selector:
    """Lists and selects, within limits."""

    limit_files: int
    limit_bytes: int

    async def select(self, wanted: WeightsSource, source: Source, resolution: Resolution) -> Selected:
        """What of the source is wanted.

        Raises:
            NoFilesMatchedError, InvalidSourceError, LimitExceededError, or whatever the upstream's failure is.
        """
        within = literal_prefixes(wanted.patterns)
        selected = Selected(Listing(), ())
        if within != _EVERYTHING:
            selected = await asyncio.to_thread(_select, wanted, await self._list(wanted, source, resolution, within))
        # A pattern that matched nothing there may match elsewhere (ignored there), or nearly (the hint). Then everything is
        # listed after all, so that what a user reads does not depend on how it was found out; unless that is over the
        # limit, and something was selected.
        if not selected.files or selected.warnings:
            try:
                listed = await self._list(wanted, source, resolution, _EVERYTHING)
            except LimitExceededError:
                if not selected.files:
                    raise
            else:
                selected = await asyncio.to_thread(_select, wanted, listed)
                if not selected.files:
                    raise await asyncio.to_thread(_nothing_matched, wanted, [file.path for file in listed])
        await asyncio.to_thread(self._check, wanted, selected.files)
        return selected

    async def _list(
        self, wanted: WeightsSource, source: Source, resolution: Resolution, within: Sequence[str]
    ) -> Listing:
        listed = Listing()
        async for file in source.list(resolution, within):
            listed.append(file)
            if len(listed) > self.limit_files:
                raise LimitExceededError(f"files of {wanted.source}", len(listed), self.limit_files)
        return listed

    def _check(self, wanted: WeightsSource, files: Listing) -> None:
        problems = _problems(files)
        if named := list(islice(problems, _MOST_PROBLEMS)):
            if more := sum(1 for _ in problems):
                named.append(f"and {more} more")
            raise InvalidSourceError(
                str(wanted.source),
                f"{wanted.source} cannot become a tree of files: {'; '.join(named)}. Leave these out with ignore_patterns, "
                "or rename them in the source",
            )
        if (total := files.bytes_total) > self.limit_bytes:
            raise LimitExceededError(f"bytes of {wanted.source}", total, self.limit_bytes)


def _problems(files: Listing) -> Iterator[str]:
    """Why these files cannot be a tree, each name escaped."""
    impossible = set[str]()
    for file in files:
        try:
            normalise_path(file.path)
        except UnsafePathError as error:
            impossible.add(file.path)
            yield str(error)
    yield from tree_problems(file.path for file in files if file.path not in impossible)


def _select(wanted: WeightsSource, listed: Listing) -> Selected:
    """In a thread, because a million files take seconds."""
    if not (wanted.patterns.allow or wanted.patterns.ignore):
        return Selected(listed, ())
    selection = select([file.path for file in listed], wanted.patterns)
    if len(selection.paths) == len(listed):
        return Selected(listed, selection.warnings)
    chosen = set(selection.paths)
    return Selected(Listing(file for file in listed if file.path in chosen), selection.warnings)


def _nothing_matched(wanted: WeightsSource, paths: Sequence[str]) -> NoFilesMatchedError:
    hints = [hint_for(pattern, paths).removeprefix("; ") for pattern in wanted.patterns.allow]
    hint = next((hint for hint in hints if hint), "")
    return NoFilesMatchedError(str(wanted.source), len(paths), wanted.patterns.allow, wanted.patterns.ignore, hint)
