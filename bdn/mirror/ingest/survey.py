"""Resolve, list, select, diff: what mirroring a source would do, from metadata alone.

Prefixes that no pattern can match are not listed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import attrgetter
from typing import Final, NamedTuple

from bdn.core.chunk import (
    Digest,
    FileLayout,
    MalformedDocumentError,
    Slice,
    UnsafePathError,
    chunk_range,
    normalise_path,
    tree_problems,
)
from bdn.core.errors import InvalidSourceError, LimitExceededError, NoFilesMatchedError
from bdn.core.listing import ListingRoot, listed_in
from bdn.core.manifest import Cutter, PlacedFile, empty_file, files_of, is_small, large_file, slab_cutter
from bdn.core.source.upstream import Identity, Listing, Resolution, Source, UpstreamFile
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
from bdn.core.store import ChunkStore
from bdn.mirror.db import chunks as chunk_rows
from bdn.mirror.db import identities, manifests, mirrors
from bdn.mirror.db.database import Database
from bdn.mirror.db.identities import Known
from bdn.mirror.db.manifests import DocumentDamagedError
from bdn.mirror.upstream.checkpoints import CheckpointSource, pinned
from bdn.mirror.upstream.sign_ins import SignIns
from bdn.sources.opener import open_source

logger = logging.getLogger(__name__)

Hold = Callable[[Collection[Digest]], Awaitable[Collection[Digest]]]
Before = Callable[[AbstractSet[str]], Awaitable[Mapping[str, FileLayout]]]


@dataclass(frozen=True, slots=True)
class Unit:
    """Copied as one: a file of 1 MiB or more, or the small files of one slab, in order. ``key`` is its identity's."""

    key: str
    size: int
    files: Sequence[UpstreamFile]

    @property
    def is_slab(self) -> bool:
        return is_small(self.files[0].size)


def units_of(files: Iterable[UpstreamFile]) -> Iterator[Unit]:
    """The units of files that are given in path order. Empty files are in none."""
    cutter: Cutter[UpstreamFile] = slab_cutter()
    for file in files:
        if is_small(file.size):
            yield from map(_slab, cutter.add(file, file.path, file.size))
        elif file.size:
            yield Unit(file.identity.key, file.size, (file,))
    yield from map(_slab, cutter.finish())


def _slab(files: Sequence[UpstreamFile]) -> Unit:
    key = Identity.of(files[0].identity.scope, "slab", *(file.identity.key for file in files)).key
    return Unit(key, sum(file.size for file in files), files)


@dataclass(frozen=True)
class Survey:
    """What a source contains now, in path order, and what of it the store has.

    ``known`` are units of which the store has all or, of a large file, some chunks; copied units are added to it.
    ``lacking`` are the bytes to be read from the upstream of each other unit, by its key.
    ``tree`` are all files of a hub's commit, selected or not; None if only a part was listed, and for other sources.
    """

    resolution: Resolution
    files: Listing
    known: dict[str, Known]
    warnings: tuple[str, ...]
    lacking: dict[str, int]
    prior: Mapping[str, FileLayout] = field(default_factory=dict)  # earlier layouts, by the keys of files' identities
    tree: Listing | None = None

    @property
    def bytes_missing(self) -> int:
        return sum(self.lacking.values())

    @property
    def bytes_total(self) -> int:
        return self.files.bytes_total

    def missing(self) -> Iterator[Unit]:
        """The units to be copied; of several with one key, the first."""
        seen = set[str]()
        for unit in units_of(self.files) if self.lacking else ():
            if unit.key not in seen and not self._is_whole(unit.key):
                seen.add(unit.key)
                yield unit

    def _is_whole(self, key: str) -> bool:
        known = self.known.get(key)
        return known is not None and known.digest is not None

    def bytes_missing_of(self, unit: Unit) -> int:
        """The bytes of a unit to be read from the upstream."""
        if self._is_whole(unit.key):
            return 0
        stored = 0 if unit.is_slab else stored_bytes(self.known.get(unit.key), unit.size)
        return self.bytes_fetched_of(unit) - stored

    def bytes_fetched_of(self, unit: Unit) -> int:
        """The bytes to be read of a unit that the store does not have; of a slab, those of files that it has not."""
        if not unit.is_slab:
            return unit.size
        return sum(file.size for file in unit.files if file.identity.key not in self.prior)

    def contents(self) -> Iterator[tuple[UpstreamFile, Digest | None]]:
        """Every file that is not empty, and its digest if the store knows it; in no order."""
        for unit in units_of(self.files):
            known = self.known.get(unit.key)
            if unit.is_slab:
                yield from zip(
                    unit.files, known.digests() if known else map(self._digest_before, unit.files), strict=True
                )
            else:
                yield unit.files[0], known.digest if known else None

    def _digest_before(self, file: UpstreamFile) -> Digest | None:
        layout = self.prior.get(file.identity.key)
        return layout.digest if layout else None

    def placed(self) -> Iterator[PlacedFile]:
        """Every file and where its bytes are. All units must be known."""
        slabs = (self.known[unit.key] for unit in units_of(self.files) if unit.is_slab)
        slab: Known | None = None
        digests: Iterator[Digest | None] = iter(())
        offset = 0
        for file in self.files:
            if not file.size:
                yield empty_file(file.path)
            elif not is_small(file.size):
                yield large_file(file.path, file.size, tuple(self.known[file.identity.key].chunks.values()))
            else:
                if (digest := next(digests, None)) is None:
                    slab, offset = next(slabs), 0
                    digests = slab.digests()
                    digest = next(digests, None)
                yield PlacedFile(file.path, _sliced(file.size, digest, slab, offset))
                offset += file.size


def _sliced(size: int, digest: Digest | None, slab: Known | None, offset: int) -> FileLayout:
    if slab is None or slab.digest is None or digest is None:
        raise ValueError("a slab is not known")
    return FileLayout(digest, size, (digest,), Slice(slab.digest, slab.size, offset))


def stored_bytes(known: Known | None, size: int) -> int:
    if known is None:
        return 0
    return size if known.digest else sum(chunk_range(size, index).size for index in known.chunks)


def units_before(unit: Unit, prior: Mapping[str, FileLayout]) -> Known | None:
    """The unit as in an earlier manifest; ``prior`` are its layouts, by the keys of the files' identities."""
    layouts = [prior.get(file.identity.key) for file in unit.files]
    if not unit.is_slab:
        (layout,) = layouts
        return (
            layout
            if layout is None
            else Known(unit.key, unit.size, layout.digest, b"".join(map(Digest.to_bytes, layout.chunks)))
        )
    slab, raw, size = None, bytearray(), 0
    for layout in layouts:
        if (
            layout is None
            or layout.slice is None
            or layout.slice.offset != size
            or slab not in (None, layout.slice.slab)
        ):
            return None
        slab = layout.slice.slab
        raw += layout.digest.to_bytes()
        size += layout.size
    whole = layouts[0] and layouts[0].slice and layouts[0].slice.slab_size == size
    return Known(unit.key, size, slab, bytes(raw), is_slab=True) if whole else None


class _Question(NamedTuple):
    """Whether the store has a unit: as it was ``before``, or by its identity. ``size``: bytes to read if it has not."""

    key: str
    size: int
    is_slab: bool
    before: Known | None = None


@dataclass(frozen=True)
class Surveyor:
    database: Database
    sign_ins: SignIns
    limit_files: int
    limit_bytes: int
    store: ChunkStore
    bucket: BucketUri | None = None  # the store's; None: a directory, which no source can name

    def check(self, wanted: WeightsSource, organisation: str) -> None:
        """Reject early a sign-in that cannot be resolved, and a source that shares objects with the store."""
        self.sign_ins.check(wanted.auth, organisation)
        self._check_outside(wanted.source)

    def _check_outside(self, uri: SourceUri) -> None:
        """Reject sources in the store, which contains chunks of all organisations.

        The bucket's name alone decides: one bucket may have several endpoints, and on some servers also ``gs://`` and
        ``s3://`` addresses.
        """
        if not isinstance(uri, BucketUri) or uri.scheme in ("azure", "hf"):  # where no store can be
            return
        if self.bucket is None or uri.bucket.lower() != self.bucket.bucket.lower():
            return
        pairs = zip(_folders(uri), _folders(self.bucket), strict=False)
        if all(ours == theirs for ours, theirs in pairs):
            raise InvalidSourceError(
                str(uri),
                f"{uri} overlaps with this mirror's own store, by its bucket's name and prefix; a source has to be "
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
        """Open a source with its credentials, for a job (None: a dry run); ``revision`` pins an earlier resolution.

        ``team`` restricts checkpoints to a team's; None: all teams'. Only that team, or the organisation, may read
        private content.
        """
        uri = wanted.source
        if isinstance(uri, CheckpointUri):
            yield CheckpointSource(
                self.database, self.store, pinned(uri, revision) if revision else uri, organisation, team
            )
            return
        self._check_outside(uri)
        if revision is not None and isinstance(uri, HuggingFaceUri):
            uri = replace(uri, revision=revision)
        async with open_source(uri, await self.sign_ins.context_of(wanted.auth, organisation, job, team)) as source:
            yield source

    async def survey(
        self,
        wanted: WeightsSource,
        source: Source,
        resolution: Resolution | None = None,
        hold: Hold | None = None,
        before: Before | None = None,
    ) -> Survey:
        """Survey an open source; ``resolution`` is what it was resolved to, if that has been done.

        ``hold`` refers to stored chunks and returns them. Without it, a collection may delete them after the survey.
        ``before`` finds earlier layouts of files, by the keys of their identities.

        Raises:
            NoFilesMatchedError, InvalidSourceError, LimitExceededError, or the upstream's failure.
        """
        resolution = resolution or await source.resolve()
        selected = await Selector(self.limit_files, self.limit_bytes).select(wanted, source, resolution)
        files = await asyncio.to_thread(_by_path, selected.files)
        tree = files if selected.tree is selected.files else selected.tree
        if tree is not None:
            tree = await asyncio.to_thread(_by_path, tree)
        survey = Survey(resolution, files, {}, selected.warnings, {}, tree=tree)
        units = (_Question(unit.key, unit.size, unit.is_slab) for unit in units_of(survey.files))
        await self._look(units, survey, hold or self._stored)
        most = _MOST_BEFORE
        if isinstance(source, CheckpointSource):  # its bytes exist nowhere else
            before, most = source.placed, self.limit_files
        if before is None or not survey.lacking:
            return survey
        keys = await asyncio.to_thread(_keys_of, survey.missing(), most)
        if not keys or not (prior := await before(keys)):
            return survey
        slabs = {layout.slice.slab for layout in prior.values() if layout.slice is not None}
        lost = slabs.difference(await self._stored(slabs))
        prior = {key: one for key, one in prior.items() if one.slice is None or one.slice.slab not in lost}
        survey = replace(survey, prior=prior)
        again = (
            _Question(unit.key, survey.bytes_fetched_of(unit), unit.is_slab, units_before(unit, prior))
            for unit in survey.missing()
        )
        await self._look(again, survey, hold or self._stored)
        return survey

    async def tree(self, wanted: WeightsSource, source: Source, resolution: Resolution) -> Listing:
        """All files of an open source, in path order."""
        listed = await Selector(self.limit_files, self.limit_bytes).everything(wanted, source, resolution)
        return await asyncio.to_thread(_by_path, listed)

    async def before(
        self, wanted: WeightsSource, organisation: str, keys: AbstractSet[str]
    ) -> Mapping[str, FileLayout]:
        """The layouts of files with these identities in the newest mirror of the source."""
        name = str(wanted.source)
        if isinstance(wanted.source, HuggingFaceUri):
            name = name.partition("@")[0]
        async with self.database.read() as session:
            row = await mirrors.newest_ready(session, organisation, name, is_listed=True)
        if row is None or not row.manifest or not row.listing:
            return {}
        try:
            return await asyncio.to_thread(_layouts_by_key, self.store, Digest(row.manifest), Digest(row.listing), keys)
        except (DocumentDamagedError, MalformedDocumentError) as error:
            logger.info(
                "cannot read the source's earlier listing; comparing with none",
                extra={"source": name, "error": str(error)},
            )
            return {}

    async def _look(self, units: Iterator[_Question], survey: Survey, hold: Hold) -> None:
        """Find out which units are known and stored."""
        while some := await asyncio.to_thread(lambda: list(islice(units, _UNITS_AT_ONCE))):
            found = {unit.key: unit.before for unit in some if unit.before is not None}
            async with self.database.read() as session:
                found |= await identities.find(session, [unit.key for unit in some if unit.key not in found])
            chunks = {chunk for one in found.values() for chunk in one.chunks.values()}
            missing = chunks.difference(await hold(chunks))
            known = {key: one.without(missing) for key, one in found.items()}
            survey.known.update((key, one) for key, one in known.items() if one is not None)
            for unit in some:
                one = survey.known.get(unit.key)
                if one is not None and one.digest is not None:
                    survey.lacking.pop(unit.key, None)
                else:
                    survey.lacking[unit.key] = unit.size - (0 if unit.is_slab else stored_bytes(one, unit.size))

    async def _stored(self, digests: Collection[Digest]) -> Collection[Digest]:
        async with self.database.read() as session:
            return await chunk_rows.of(session, chunk_rows.stored, digests)


def _layouts_by_key(
    store: ChunkStore, manifest: Digest, listing: Digest, keys: AbstractSet[str]
) -> dict[str, FileLayout]:
    """The layouts of the files with these identities. Blocking.

    Raises ``DocumentDamagedError``, ``MalformedDocumentError``.
    """
    pages = (manifests.document(store, page) for page in ListingRoot.parse(manifests.document(store, listing)).pages)
    wanted = {one.path: one.key for one in listed_in(pages) if one.key in keys}
    root = manifests.root_of(store, manifest)
    files = files_of(manifests.document(store, page.digest) for page in root.pages)
    return {wanted[file.path]: file.layout for file in files if file.path in wanted}


def _keys_of(units: Iterable[Unit], most: int) -> set[str]:
    """The keys of all files in these units; empty if they are more than ``most``. Blocking."""
    keys: set[str] = set()
    for unit in units:
        keys.update(file.identity.key for file in unit.files)
        if len(keys) > most:
            return set()
    return keys


def _folders(uri: BucketUri) -> list[str]:
    """Without empty and ``.`` segments, which some servers remove from keys."""
    return [name for name in uri.prefix.split("/") if name not in ("", ".")]


def _by_path(files: Listing) -> Listing:
    """Most upstreams list in path order; otherwise this takes 600 MB for a million files. Blocking."""
    return files if files.is_sorted else Listing(sorted(files, key=attrgetter("path")))


_UNITS_AT_ONCE: Final = 250
_MOST_BEFORE: Final = 200_000  # files; some 150 MB of layouts
_EVERYTHING: Final = ("",)
_MOST_PROBLEMS: Final = 10  # named in one error


@dataclass(frozen=True, slots=True)
class Selected:
    """The wanted files, in the order of the listing, and a warning for each pattern that matched nothing.

    ``tree`` as in ``Survey``.
    """

    files: Listing
    warnings: tuple[str, ...]
    tree: Listing | None = None


@dataclass(frozen=True, slots=True)
class Selector:
    limit_files: int
    limit_bytes: int

    async def select(self, wanted: WeightsSource, source: Source, resolution: Resolution) -> Selected:
        """Select the wanted files of the source.

        Raises:
            NoFilesMatchedError, InvalidSourceError, LimitExceededError, or the upstream's failure.
        """
        within = literal_prefixes(wanted.patterns)
        selected = Selected(Listing(), ())
        if within != _EVERYTHING:
            selected = await asyncio.to_thread(_select, wanted, await self._list(wanted, source, resolution, within))
        # A pattern that matched nothing there may match elsewhere (ignored there), or nearly (the hint). Then
        # everything is listed after all, so that warnings and errors do not depend on what was listed first; unless
        # that exceeds the limit and something was selected.
        if not selected.files or selected.warnings:
            try:
                listed = await self.everything(wanted, source, resolution)
            except LimitExceededError:
                if not selected.files:
                    raise
            else:
                selected = await asyncio.to_thread(_select, wanted, listed)
                if not selected.files:
                    raise await asyncio.to_thread(_nothing_matched, wanted, [file.path for file in listed])
                if isinstance(wanted.source, HuggingFaceUri):
                    selected = replace(selected, tree=listed)
        await asyncio.to_thread(self._check, wanted, selected.files)
        return selected

    async def everything(self, wanted: WeightsSource, source: Source, resolution: Resolution) -> Listing:
        return await self._list(wanted, source, resolution, _EVERYTHING)

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
    """Why these files cannot be a tree, with each name escaped."""
    impossible = set[str]()
    for file in files:
        try:
            normalise_path(file.path)
        except UnsafePathError as error:
            impossible.add(file.path)
            yield str(error)
    yield from tree_problems(file.path for file in files if file.path not in impossible)


def _select(wanted: WeightsSource, listed: Listing) -> Selected:
    """Takes seconds for a million files: call in a thread."""
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
