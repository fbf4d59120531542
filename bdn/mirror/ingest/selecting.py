"""List and select: the files of a source that are wanted, without listing what the patterns cannot select from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import InvalidSourceError, LimitExceededError, NoFilesMatchedError
from bdn.core.ports import Resolution, Source
from bdn.core.source.paths import UnsafePathError, check_tree
from bdn.core.source.patterns import hint_for, literal_prefixes, select
from bdn.core.source.upstream import UpstreamFile
from bdn.core.source.weights import WeightsSource

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
        if within == _EVERYTHING:
            selected = await self._from_everything(wanted, source, resolution)
        else:
            selected = await self._from_a_part(wanted, source, resolution, within)
        await asyncio.to_thread(self._check, wanted, selected.files)
        return selected

    async def _from_a_part(
        self, wanted: WeightsSource, source: Source, resolution: Resolution, within: Sequence[str]
    ) -> Selected:
        """A pattern that matched nothing here may match elsewhere (ignored there), or nearly (the hint).

        Then everything is listed after all, so that what a user reads does not depend on how it was found out; unless that
        is over the limit, and something was selected.
        """
        listed = await self._list(wanted, source, resolution, within)
        selected = await asyncio.to_thread(_select, wanted, listed)
        if selected.files and not selected.warnings:
            return selected
        del listed
        try:
            return await self._from_everything(wanted, source, resolution)
        except LimitExceededError:
            if selected.files:
                return selected
            raise

    async def _from_everything(self, wanted: WeightsSource, source: Source, resolution: Resolution) -> Selected:
        listed = await self._list(wanted, source, resolution, _EVERYTHING)
        selected = await asyncio.to_thread(_select, wanted, listed)
        if not selected.files:
            raise await asyncio.to_thread(_nothing_matched, wanted, [file.path for file in listed])
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
