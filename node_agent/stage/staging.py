"""The work of a stage, from a grant to files that its job can read. Read ``run`` from top to bottom."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bdn.core.digest import Digest
from bdn.core.groups import single_error
from bdn.core.layout import FileLayout
from bdn.wire.eviction_schema import Tier
from node_agent.cache.catalogue import Catalogue
from node_agent.cache.node_cache import NodeCache
from node_agent.cache.records import Held
from node_agent.crew import in_thread
from node_agent.disk.places import Places
from node_agent.fill.filler import Filler
from node_agent.fill.flights import Flights
from node_agent.fill.order import FileReport, Order, Report
from node_agent.fill.parcel import Parcel, parcels_of
from node_agent.fill.supply import Supplier, chunk_base
from node_agent.stage.progress import StageProgress
from node_agent.stage.stage import Stage
from node_agent.view.build import Built
from node_agent.view.destination import Destination
from node_agent.view.views import Views

_PARCELS_AT_ONCE: Final = 16  # per stage; the byte threads are the real limit


@dataclass(frozen=True)
class Staging:
    """Does it. What can fail raises ``BdnError`` and leaves the clearing up to the caller, who holds the stage."""

    catalogue: Catalogue
    cache: NodeCache
    flights: Flights
    filler: Filler
    supplier: Supplier
    views: Views
    places: Places
    mirror_url: str
    on_bytes: Report  # for the metrics: every byte once, whoever waits for it

    async def run(self, stage: Stage) -> None:
        """Obtain the manifests, make room, fill what is missing, and let the view appear."""
        held = [await self._obtain(digest, stage) for digest in stage.record.manifests]
        missing = await self.cache.admit(held, stage.record.holder)
        if missing and any(one.layout is None for one in held):
            # It was whole when we looked, and was evicted before we were admitted; now our lease protects it.
            held = [await self._obtain(digest, stage) for digest in stage.record.manifests]
            missing = await self.cache.admit(held, stage.record.holder)
        by_digest = {one.manifest.digest: one for one in held}
        mounts = [by_digest[mount.digest] for mount in stage.record.mounts]
        self._announce(stage, mounts, missing)
        await self._fill(stage, held, missing)
        await self._show(stage, mounts)

    async def _obtain(self, digest: Digest, stage: Stage) -> Held:
        is_complete = self.cache.index.is_complete(digest)
        return await self.catalogue.obtain(digest, stage.record.grant, is_complete=is_complete)

    @staticmethod
    def _announce(stage: Stage, mounts: list[Held], missing: frozenset[Digest]) -> None:
        for record, held in zip(stage.record.mounts, mounts, strict=True):
            record.files_total = len(held.manifest.files)
            record.bytes_total = held.manifest.bytes_total
        stage.begin(StageProgress([held.manifest for held in mounts], missing))

    async def _fill(self, stage: Stage, held: list[Held], missing: frozenset[Digest]) -> None:
        wanted: dict[Digest, tuple[FileLayout, str]] = {}
        for one in held if missing else ():
            base_url = chunk_base(self.mirror_url, one.layout.data_port if one.layout else None)
            layouts = await in_thread(one.file_layouts, missing)
            wanted.update((digest, (layout, base_url)) for digest, layout in layouts.items())
        parcels = parcels_of(wanted.values())
        queue = iter(parcels)
        with single_error():
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(parcels), _PARCELS_AT_ONCE)):
                    group.create_task(self._fill_from(queue, stage))

    async def _fill_from(self, queue: Iterator[Parcel], stage: Stage) -> None:
        """One of several that draw parcels from the same queue."""
        progress = stage.progress
        assert progress is not None  # noqa: S101 - announced above

        for parcel in queue:

            def report(file: Digest, tier: Tier, size: int) -> None:
                progress.report(file, tier, size)
                stage.rate.add(size, time.monotonic())

            def start(
                files: Sequence[Digest], tell: FileReport, stop: threading.Event, parcel: Parcel = parcel
            ) -> Coroutine[object, object, None]:
                return self._fill_parcel(parcel.only(files), stage, tell, stop)

            await self.flights.join(parcel.digests, start, report, progress.restart)
            for file in parcel.files:
                progress.finish(file.digest, file.size)

    async def _fill_parcel(self, parcel: Parcel, stage: Stage, tell: FileReport, stop: threading.Event) -> None:
        ledger = self.cache.index.ledger  # another stage may have finished some between our admission and now
        files = tuple(file for file in parcel.files if not ledger.is_committed(file.digest))
        if not files:
            return

        def report(file: Digest, tier: Tier, size: int) -> None:
            self.on_bytes(tier, size)
            tell(file, tier, size)

        supply = self.supplier.open(parcel.base_url, stage.record.grant, stop)
        await self.filler.fill(Order(files, supply, report, stop))

    async def _show(self, stage: Stage, mounts: list[Held]) -> None:
        record = stage.record
        if record.destination is not None:
            destination = Destination(record.destination, record.id, self.places)
            manifest = mounts[0].manifest
            result, record.inode = await in_thread(destination.publish, manifest, stage.earlier, stage.stop)
            built = {mount.mount_location: result for mount in record.mounts}
        else:
            built = await self._show_mounts(stage, mounts)
        for mount in record.mounts:
            mount.view = built[mount.mount_location].kind
            mount.view_reason = built[mount.mount_location].reason
            mount.exposure = "none" if record.destination is not None else self.views.kind

    async def _show_mounts(self, stage: Stage, mounts: list[Held]) -> dict[str, Built]:
        manifests = {
            mount.mount_location: held.manifest for mount, held in zip(stage.record.mounts, mounts, strict=True)
        }
        built = await in_thread(self.views.publish, stage.record.id, manifests, stage.stop)
        await in_thread(self.views.expose, stage.record.id, list(manifests))
        return built
