"""Resolve, list, select, diff: what mirroring a source would mean, by metadata alone.

What the patterns cannot select from is not listed.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from bdn.core.chunk import Digest, FileEntry, Manifest, UnsafePathError, check_tree, chunk_range
from bdn.core.errors import InvalidSourceError, LimitExceededError, NoFilesMatchedError
from bdn.core.source.upstream import Diff, Resolution, Source, UpstreamFile, diff
from bdn.core.source.uri import HuggingFaceUri, WeightsSource, hint_for, literal_prefixes, select
from bdn.mirror.db import contents
from bdn.mirror.db.database import Database
from bdn.mirror.upstream.sign_ins import SignIns
from bdn.sources.opener import open_source


@dataclass(frozen=True, slots=True)
class Survey:
    """What a source holds now, what of it is wanted, and what the store lacks."""

    resolution: Resolution
    files: tuple[UpstreamFile, ...]
    diff: Diff
    stored: dict[str, int]  # bytes of half-copied files by identity key
    warnings: tuple[str, ...]

    @property
    def bytes_total(self) -> int:
        """The size of the tree."""
        return sum(file.size for file in self.files)

    @property
    def bytes_missing(self) -> int:
        """What has to be read from the upstream; equal identities are read once."""
        return sum(map(self.bytes_missing_of, self.diff.missing))

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

    @asynccontextmanager
    async def open(
        self, wanted: WeightsSource, organisation: str, job: str | None = None, revision: str | None = None
    ) -> AsyncIterator[Source]:
        """The source with its credentials, on behalf of a job (None: a dry run); ``revision`` pins one that was resolved before."""
        uri = wanted.source
        if revision is not None and isinstance(uri, HuggingFaceUri):
            uri = replace(uri, revision=revision)
        async with open_source(uri, await self.sign_ins.context_of(wanted.auth, organisation, job)) as source:
            yield source

    async def survey(self, wanted: WeightsSource, source: Source, resolution: Resolution | None = None) -> Survey:
        """Look at an open source; ``resolution`` is what it was resolved to, if that has been done.

        Raises:
            NoFilesMatchedError, InvalidSourceError, LimitExceededError, or whatever the upstream's failure is.
        """
        resolution = resolution or await source.resolve()
        selected = await Selector(self.limit_files, self.limit_bytes).select(wanted, source, resolution)
        files = selected.files
        # In threads, because a million files take seconds.
        keys = await asyncio.to_thread(lambda: list({file.identity.key for file in files}))
        async with self.database.read() as session:
            known = await contents.without_lost(session, files, await contents.known(session, keys))
        found = await asyncio.to_thread(diff, files, known)
        return Survey(resolution, files, found, await self._stored(found.missing), selected.warnings)

    async def _stored(self, missing: tuple[UpstreamFile, ...]) -> dict[str, int]:
        sizes = {file.identity.key: file.size for file in missing}
        async with self.database.read() as session:
            half = await contents.half_copied(session, list(sizes))
        return {key: sum(chunk_range(sizes[key], index).size for index in indexes) for key, indexes in half.items()}


def manifest_of(survey: Survey, digests: Mapping[str, Digest]) -> Manifest:
    """The manifest with its name; in a thread, because a million files take seconds."""
    manifest = Manifest.of(
        FileEntry(file.path, file.size, survey.diff.held.get(file.path) or digests[file.identity.key])
        for file in survey.files
    )
    _ = manifest.digest, manifest.contents, manifest.bytes_total
    return manifest


_EVERYTHING: Final = ("",)


@dataclass(frozen=True, slots=True)
class Selected:
    """The wanted files, in the order of the listing, and a warning for each pattern that matched nothing."""

    files: tuple[UpstreamFile, ...]
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
        selected = Selected((), ())
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
    ) -> list[UpstreamFile]:
        listed: list[UpstreamFile] = []
        async for file in source.list(resolution, within):
            listed.append(file)
            if len(listed) > self.limit_files:
                raise LimitExceededError(f"files of {wanted.source}", len(listed), self.limit_files)
        return listed

    def _check(self, wanted: WeightsSource, files: Sequence[UpstreamFile]) -> None:
        try:
            check_tree(file.path for file in files)
        except UnsafePathError as error:
            raise InvalidSourceError(str(wanted.source), str(error)) from error
        if (total := sum(file.size for file in files)) > self.limit_bytes:
            raise LimitExceededError(f"bytes of {wanted.source}", total, self.limit_bytes)


def _select(wanted: WeightsSource, listed: Sequence[UpstreamFile]) -> Selected:
    """In a thread, because a million files take seconds."""
    selection = select([file.path for file in listed], wanted.patterns)
    if len(selection.paths) == len(listed):
        return Selected(tuple(listed), selection.warnings)
    chosen = set(selection.paths)
    return Selected(tuple(file for file in listed if file.path in chosen), selection.warnings)


def _nothing_matched(wanted: WeightsSource, paths: Sequence[str]) -> NoFilesMatchedError:
    hints = [hint_for(pattern, paths).removeprefix("; ") for pattern in wanted.patterns.allow]
    hint = next((hint for hint in hints if hint), "")
    return NoFilesMatchedError(str(wanted.source), len(paths), wanted.patterns.allow, wanted.patterns.ignore, hint)
