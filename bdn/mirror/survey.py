"""Resolve, list, select, diff: what mirroring a source would mean, by metadata alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from bdn.core.chunk import chunk_range
from bdn.core.errors import InvalidSourceError, LimitExceededError, NoFilesMatchedError
from bdn.core.paths import UnsafePathError, check_tree
from bdn.core.patterns import hint_for, select
from bdn.core.ports import Resolution, Source
from bdn.core.source_uri import HuggingFaceUri
from bdn.core.upstream import Diff, UpstreamFile, diff
from bdn.core.weights import WeightsSource
from bdn.mirror.database import Database
from bdn.mirror.repository import contents
from bdn.mirror.secrets import Secrets
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings


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
    secrets: Secrets
    upstreams: UpstreamSettings
    ambient_credentials: bool
    limit_files: int
    limit_bytes: int

    @asynccontextmanager
    async def open(
        self, wanted: WeightsSource, organisation: str, revision: str | None = None
    ) -> AsyncIterator[Source]:
        """The source with its credentials; ``revision`` pins one that was resolved before."""
        uri = wanted.source
        if revision is not None and isinstance(uri, HuggingFaceUri):
            uri = replace(uri, revision=revision)
        name = wanted.auth.secret_name if wanted.auth else None
        secret = self.secrets.resolve(name) if name else None
        async with open_source(
            uri,
            secret=secret,
            organisation=organisation,
            ambient_credentials=self.ambient_credentials,
            settings=self.upstreams,
        ) as source:
            yield source

    async def survey(self, wanted: WeightsSource, source: Source, resolution: Resolution | None = None) -> Survey:
        """Look at an open source; ``resolution`` is what it was resolved to, if that has been done.

        Raises:
            NoFilesMatchedError, InvalidSourceError, LimitExceededError, or whatever the upstream's failure is.
        """
        resolution = resolution or await source.resolve()
        listed: list[UpstreamFile] = []
        async for file in source.list(resolution):
            listed.append(file)
            if len(listed) > self.limit_files:
                raise LimitExceededError(f"files of {wanted.source}", len(listed), self.limit_files)
        # In threads, because a million files take seconds.
        files, warnings = await asyncio.to_thread(self._select, wanted, listed)
        keys = await asyncio.to_thread(lambda: list({file.identity.key for file in files}))
        async with self.database.read() as session:
            known = await contents.known(session, keys)
        found = await asyncio.to_thread(diff, files, known)
        return Survey(resolution, files, found, await self._stored(found.missing), warnings)

    def _select(
        self, wanted: WeightsSource, listed: list[UpstreamFile]
    ) -> tuple[tuple[UpstreamFile, ...], tuple[str, ...]]:
        """The wanted files, and warnings."""
        paths = [file.path for file in listed]
        selection = select(paths, wanted.patterns)
        if not selection.paths:
            raise self._nothing_matched(wanted, paths)
        chosen = set(selection.paths)
        files = tuple(file for file in listed if file.path in chosen)
        try:
            check_tree(file.path for file in files)
        except UnsafePathError as error:
            raise InvalidSourceError(str(wanted.source), str(error)) from error
        if (total := sum(file.size for file in files)) > self.limit_bytes:
            raise LimitExceededError(f"bytes of {wanted.source}", total, self.limit_bytes)
        return files, selection.warnings

    async def _stored(self, missing: tuple[UpstreamFile, ...]) -> dict[str, int]:
        sizes = {file.identity.key: file.size for file in missing}
        async with self.database.read() as session:
            half = await contents.half_copied(session, list(sizes))
        return {key: sum(chunk_range(sizes[key], index).size for index in indexes) for key, indexes in half.items()}

    @staticmethod
    def _nothing_matched(wanted: WeightsSource, paths: list[str]) -> NoFilesMatchedError:
        hints = [hint_for(pattern, paths).removeprefix("; ") for pattern in wanted.patterns.allow]
        hint = next((hint for hint in hints if hint), "")
        return NoFilesMatchedError(str(wanted.source), len(paths), wanted.patterns.allow, wanted.patterns.ignore, hint)
