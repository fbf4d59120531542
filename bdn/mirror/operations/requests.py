"""Operations on request: evictions, prefetches, verifications, and collections of the store.

Agents get commands in replies to heartbeats, and report. The mirror's own part runs at once for an eviction, in the
store's keeper for a verification, and in a worker for a collection.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bdn.core.chunk import Digest
from bdn.core.errors import BdnError, InternalError, InvalidRequestError, NotFoundError
from bdn.core.pace.rounds import is_round_due
from bdn.core.store import KINDS
from bdn.mirror.db import agents, mirrors, operations
from bdn.mirror.db.database import Database, ReadSession
from bdn.mirror.db.operations import MIRROR, Who
from bdn.mirror.db.tables import AgentRow, OperationPartRow, OperationRow
from bdn.mirror.db.waiting import asked_topic
from bdn.mirror.operations.operations import (
    CACHE_REMOVAL,
    COLLECTION,
    EVICTION,
    PREFETCH,
    VERIFICATION,
    OperationKind,
    Operations,
)
from bdn.mirror.upkeep.collection import Collected, Collector
from bdn.mirror.upkeep.eviction import StoreEviction
from bdn.wire.cache_schema import RemoveCacheCommand
from bdn.wire.grants import Grant, GrantedMount, GrantSigner
from bdn.wire.heartbeat_schema import Command
from bdn.wire.operation_schema import (
    CollectedKind,
    Collection,
    CollectionRequest,
    DamagedItem,
    EvictCommand,
    EvictedItem,
    Eviction,
    EvictionRequest,
    Prefetch,
    PrefetchCommand,
    PrefetchNode,
    PrefetchRequest,
    Verification,
    VerificationRequest,
    VerifyCommand,
)
from bdn.wire.shapes import ErrorBody, added, body_of

logger = logging.getLogger(__name__)

_ANYWHERE: Final = "/prefetched"  # a grant names mounts; mounts of prefetches are never shown
_NOBODY: Final = "an agent of {}, {} (operations skip agents that left or sent no heartbeat for a day)"
_GRANTED_AT_ONCE: Final = 256  # manifests of one grant, which must fit into a request header

_Mount = dict[str, Any]
_Narrowed = EvictionRequest | VerificationRequest  # to one tier, cluster or node; null is any


@dataclass(frozen=True)
class OperationRequests:
    """The service behind ``/evictions``, ``/prefetches`` and ``/verifications``.

    Each method returns its operation once it is over or the waiting time ends. ``NotFoundError`` also for another
    organisation's operation.
    """

    database: Database
    operations: Operations
    store_eviction: StoreEviction
    signer: GrantSigner
    grant_seconds: int
    clock: Callable[[], float] = time.time

    async def evict(self, request: EvictionRequest, organisation: str, wait_seconds: float) -> Eviction:
        """Record the eviction, notify the agents, and carry out the mirror's part.

        Raises:
            InvalidRequestError: the selectors contradict each other, or the plan is not one or has not ended.
            NotFoundError: the source or manifest was never mirrored, no agent of that name ever sent a heartbeat, or
                no operation has the id of the plan.
        """
        request.check()
        if request.plan is not None:
            await self._check_plan(request.plan, organisation)
        names = {"source", "tier", "job", "lru_bytes", "all", "dry_run", "force", "plan", "purge"}
        command = EvictCommand(
            **request.model_dump(include=names),
            id=EVICTION.new_id(),
            manifests=await self._manifests(request, organisation),
            asked_by=f"an operator of {organisation}",
            organisation=organisation,
        )
        # Selectors by age or job mean the caches of nodes, unless the request names the mirror's tier.
        is_spared = request.tier is None and (request.lru_bytes is not None or request.job is not None)
        is_for_mirror = _asks_mirror(request) and not is_spared
        await self._begin(EVICTION, command, request, is_for_mirror=is_for_mirror, organisation=organisation)
        if is_for_mirror:
            try:
                await self.store_eviction.run(await self._with_planned(command, ("", MIRROR)), organisation)
            except BdnError as error:
                await self.operations.answer(command.id, None, body_of(error))
                raise
            await self.operations.answer(command.id, None)
        return await self.get_eviction(command.id, organisation, wait_seconds)

    async def get_eviction(self, eviction_id: str, organisation: str, wait_seconds: float) -> Eviction:
        operation = await self.operations.get(EVICTION, eviction_id, organisation, wait_seconds)
        items = [EvictedItem.model_validate(item) for item in operation.all("items")]
        manifests = [item.manifest.removeprefix("b3:") for item in items]
        async with self.database.read() as session:
            sources = await mirrors.sources_by_manifest(session, organisation, list(set(manifests))) if items else {}
        for item, manifest in zip(items, manifests, strict=True):
            item.sources = sources.get(manifest, [])
        gone = [item for item in items if not item.refused]
        return Eviction(
            **operation.document(),
            items=items,
            bytes_freed=sum(item.bytes for item in gone),
            bytes_kept=sum(item.bytes for item in gone if item.restorable_until),
            kept_until=max((item.restorable_until for item in gone if item.restorable_until), default=None),
            skipped_pushed=sum(part.result.get("skipped_pushed", 0) for part in operation.parts if not part.cluster),
            skipped_pushed_bytes=sum(
                part.result.get("skipped_pushed_bytes", 0) for part in operation.parts if not part.cluster
            ),
        )

    async def verify(self, request: VerificationRequest, organisation: str, wait_seconds: float) -> Verification:
        """Record the verification and notify the agents and the store's keeper. Raises what ``evict`` raises."""
        request.check()
        command = VerifyCommand(
            **request.model_dump(include={"tier", "all", "repair"}),
            id=VERIFICATION.new_id(),
            manifests=await self._manifests(request, organisation),
        )
        is_for_mirror = _asks_mirror(request)
        await self._begin(VERIFICATION, command, request, is_for_mirror=is_for_mirror, organisation=organisation)
        return await self.get_verification(command.id, organisation, wait_seconds)

    async def get_verification(self, verification_id: str, organisation: str, wait_seconds: float) -> Verification:
        operation = await self.operations.get(VERIFICATION, verification_id, organisation, wait_seconds)
        items: list[DamagedItem] = []
        chunks_read = bytes_read = 0
        for part in operation.parts:
            place = {"cluster": part.cluster, "node": part.node} if part.cluster else {}
            items += [DamagedItem.model_validate(item | place) for item in part.result.get("items", [])]
            chunks_read = added(chunks_read, part.result.get("chunks_read", 0))
            bytes_read = added(bytes_read, part.result.get("bytes_read", 0))
        return Verification(**operation.document(), items=items, chunks_read=chunks_read, bytes_read=bytes_read)

    async def prefetch(self, request: PrefetchRequest, organisation: str, wait_seconds: float) -> Prefetch:
        """Record the prefetch and notify the agents.

        Raises:
            InvalidRequestError: the digest is invalid, the mirror is not READY, or a named agent stores no files for
                jobs.
            NotFoundError: the mirror holds no such manifest of this organisation, or there are no such agents.
        """
        request.check()
        prefetch_id = PREFETCH.new_id()
        command = {"mounts": await self._mounts(request, organisation)}
        nodes = await self._nodes(request)
        await self.operations.begin(PREFETCH, prefetch_id, request, command, organisation=organisation, asked=nodes)
        return await self.get_prefetch(prefetch_id, organisation, wait_seconds)

    async def get_prefetch(self, prefetch_id: str, organisation: str, wait_seconds: float) -> Prefetch:
        operation = await self.operations.get(PREFETCH, prefetch_id, organisation, wait_seconds)
        mounts = operation.row.command["mounts"]
        return Prefetch.model_validate(
            operation.document()
            | {
                "manifests": [f"b3:{mount['manifest']}" for mount in mounts],
                "sources": [mount["source"] for mount in mounts],
                "nodes": [_node(part) for part in operation.parts],
            }
        )

    async def commands(self, cluster: str, node: str, running: set[str], volume: str | None) -> list[Command]:
        """The commands for an agent that has this volume, without those in ``running``."""
        asked = await self.operations.asked_of(cluster, node, running, volume)
        return [await self._command(row, cluster, node) for row in asked]

    async def _command(self, row: OperationRow, cluster: str, node: str) -> Command:
        """Grants are signed anew: a node that was away for days gets valid ones."""
        if row.kind == EVICTION.name:
            evict = await self._with_planned(EvictCommand.model_validate(row.command), (cluster, node))
            return Command(id=row.id, evict=evict)
        if row.kind == CACHE_REMOVAL.name:
            return Command(id=row.id, remove_cache=RemoveCacheCommand.model_validate(row.command))
        organisation = row.organisation or ""
        if row.kind == PREFETCH.name:
            mounts = [
                GrantedMount(mount["mount_location"], Digest(mount["manifest"]), mount["source"])
                for mount in row.command["mounts"]
            ]
            return Command(id=row.id, prefetch=PrefetchCommand(id=row.id, grant=self._signed(organisation, mounts)))
        command = VerifyCommand.model_validate(row.command)
        if command.repair:
            command.grants = await self._grants(organisation, cluster, node, command.manifests)
        return Command(id=row.id, verify=command)

    async def _check_plan(self, plan: str, organisation: str) -> None:
        operation = await self.operations.get(EVICTION, plan, organisation, 0)
        if not operation.row.request["dry_run"]:
            raise InvalidRequestError(f"{plan} is not a dry run: plan the eviction with dry_run, and name that plan")
        if operation.row.status == "RUNNING":
            raise InvalidRequestError(f"plan {plan} is not complete yet: wait until every agent has answered")

    async def _with_planned(self, command: EvictCommand, who: Who) -> EvictCommand:
        """The command with the holders that its plan named there."""
        if command.plan is None:
            return command
        async with self.database.read() as session:
            part = await operations.part_of(session, command.plan, who)
        items = [] if part is None else part.result.get("items", [])
        return command.model_copy(update={"holders": [holder for item in items for holder in item["holders"]]})

    async def _grants(self, organisation: str, cluster: str, node: str, manifests: Sequence[str] | None) -> list[str]:
        """Grants for what the node holds of these manifests (None: of any) and the organisation ever mirrored.

        Includes manifests that the organisation evicted: the node still holds them, and other agents may have the right
        bytes.
        """
        async with self.database.read() as session:
            held = await agents.manifests_on(session, cluster, node)
            named = held if manifests is None else held & {name.removeprefix("b3:") for name in manifests}
            wanted = sorted(named)
            sources = await mirrors.sources_by_manifest(session, organisation, wanted)
        mounts = [
            GrantedMount(f"/{number}", Digest(name), sources[name][0])
            for number, name in enumerate(wanted)
            if name in sources
        ]
        return [
            self._signed(organisation, mounts[start : start + _GRANTED_AT_ONCE])
            for start in range(0, len(mounts), _GRANTED_AT_ONCE)
        ]

    def _signed(self, organisation: str, mounts: Sequence[GrantedMount]) -> str:
        return self.signer.sign(Grant(organisation, tuple(mounts), self.database.now() + self.grant_seconds))

    async def _manifests(self, request: _Narrowed, organisation: str) -> list[str] | None:
        """The manifests that a selector by source or digest names; None for other selectors."""
        if request.manifest is None and request.source is None:
            return None
        async with self.database.read() as session:
            found = await mirrors.named_manifests(session, organisation, request.manifest, request.source)
            is_one_read = isinstance(request, VerificationRequest) and request.manifest is not None
            if is_one_read and not await mirrors.may_read(session, organisation, found[0]):
                raise NotFoundError(f"manifest {request.manifest}")
        return [f"b3:{digest}" for digest in found]

    async def _begin(
        self,
        kind: OperationKind,
        command: EvictCommand | VerifyCommand,
        request: _Narrowed,
        *,
        is_for_mirror: bool,
        organisation: str,
    ) -> None:
        """Record it for agents of any role: an agent may hold chunks from when it had another role."""
        found: list[AgentRow] = []
        if request.tier != MIRROR:
            found = await self._addressees(request.cluster, request.node)
        if not found and _names_agents(request):
            raise NotFoundError(_NOBODY.format(request.cluster or "any cluster", request.node or "any node"))
        remembered = command.model_dump()
        await self.operations.begin(
            kind, command.id, request, remembered, organisation=organisation, asked=found, mirror=is_for_mirror
        )

    async def _mounts(self, request: PrefetchRequest, organisation: str) -> list[_Mount]:
        async with self.database.read() as session:
            found = await self._named(session, request, organisation)
            held = await mirrors.readable(session, organisation, [mount["manifest"] for mount in found])
        for mount in found:
            if mount["manifest"] not in held:
                raise NotFoundError(f"manifest b3:{mount['manifest']} on the mirror")
        return found

    @staticmethod
    async def _named(session: ReadSession, request: PrefetchRequest, organisation: str) -> list[_Mount]:
        if request.manifest is not None:
            [digest] = await mirrors.named_manifests(session, organisation, request.manifest, None)
            [source, *_] = (await mirrors.sources_by_manifest(session, organisation, [digest]))[digest]
            return [_mount(digest, source)]
        if request.mirror_id is None:
            newest = await mirrors.newest_ready(session, organisation, request.source or "")
            if newest is None:
                raise NotFoundError(f"a READY mirror of {request.source}")
            return [_mount(newest.manifest, newest.source)]
        mirror = await mirrors.get(session, request.mirror_id, organisation)
        if (status := mirror.row.status) != "READY":
            raise InvalidRequestError(f"mirror {request.mirror_id} is {status}; only a READY mirror can be prefetched")
        return [_mount(source.manifest, source.source, source.mount_location) for source in mirror.sources]

    async def _addressees(self, cluster: str | None, node: str | None) -> list[AgentRow]:
        """Agents of these names, without those that left or were silent for a day; null is any."""
        async with self.database.read() as session:
            rows = await agents.named(session, cluster, node)
        now = self.clock()
        return [row for row in rows if not agents.is_forgotten(row, now)]

    async def _nodes(self, request: PrefetchRequest) -> list[AgentRow]:
        """The agents that are to hold it: all living ones of the cluster, or all named ones that may still answer."""
        there = await self._addressees(request.cluster, None)
        if request.nodes:
            return [row for name in dict.fromkeys(request.nodes) for row in _of_name(name, there)]
        living = [row for row in there if "node" in row.roles and agents.is_alive(row, self.clock())]
        if not living:
            raise NotFoundError(f"a living agent with the role node in cluster {request.cluster}")
        return living


def _asks_mirror(request: _Narrowed) -> bool:
    return request.tier == MIRROR or (request.tier is None and not _names_agents(request))


def _names_agents(request: _Narrowed) -> bool:
    return request.cluster is not None or request.node is not None


def _of_name(name: str, rows: list[AgentRow]) -> list[AgentRow]:
    found = [row for row in rows if row.node == name]
    if not found:
        raise NotFoundError(_NOBODY.format("this cluster", name))
    if not any("node" in row.roles for row in found):
        raise InvalidRequestError(f"agent {name} does not have the role node, so it holds no files for jobs")
    return [row for row in found if "node" in row.roles]


def _mount(manifest: str | None, source: str, mount_location: str = _ANYWHERE) -> _Mount:
    return {"mount_location": mount_location, "manifest": manifest, "source": source}


def _node(part: OperationPartRow) -> PrefetchNode:
    state = "READY" if part.state == "DONE" else part.state
    place = {"cluster": part.cluster, "node": part.node, "state": state, "error": part.error}
    return PrefetchNode.model_validate(place | part.result)


_LOOK_SECONDS: Final = 1.0  # between polls for requests to other processes


@dataclass(frozen=True)
class Collections:
    """The service behind ``/collections``. Any process accepts a request; one worker carries it out.

    Args:
        grace_seconds: used if the request names none.
        period_seconds: after which a collection starts without a request; 0 is never.
        on_collected: called with the bytes freed.
    """

    database: Database
    operations: Operations
    collector: Collector
    grace_seconds: float
    period_seconds: float
    on_collected: Callable[[int], object]
    clock: Callable[[], float] = time.time

    async def start(self, request: CollectionRequest, wait_seconds: float) -> Collection:
        collection_id = COLLECTION.new_id()
        await self.operations.begin(COLLECTION, collection_id, request, {}, mirror=True)
        return await self.get(collection_id, wait_seconds)

    async def get(self, collection_id: str, wait_seconds: float) -> Collection:
        operation = await self.operations.get(COLLECTION, collection_id, None, wait_seconds)
        kinds = [CollectedKind.model_validate(kind) for kind in operation.all("kinds")]
        return Collection(**operation.document(), kinds=kinds, bytes_freed=sum(kind.bytes for kind in kinds))

    async def work(self) -> None:
        """Run until canceled: carry out collections that are requested, due, or left by a killed worker."""
        asking = self.database.watch.topic(asked_topic(COLLECTION.name))
        while True:
            changes = asking.changes
            try:
                await self._begin_what_is_due()
                async with self.database.read() as session:
                    asked = await operations.open_of_mirror(session, COLLECTION.name)
                for row in asked:
                    await self._carry_out(row.id)
                if asked:
                    continue  # requests may have arrived meanwhile
            except BdnError as error:  # the database is away: open requests stay open
                logger.warning("cannot collect now; retrying", extra={"error": str(error)})
            await asking.changed(changes, _LOOK_SECONDS)

    async def _begin_what_is_due(self) -> None:
        if await self._is_due():
            async with self.database.alone("collections"):
                if await self._is_due():
                    await self.operations.begin(COLLECTION, COLLECTION.new_id(), CollectionRequest(), {}, mirror=True)

    async def _is_due(self) -> bool:
        now = self.clock()
        async with self.database.read() as session:
            since = await operations.last_collection(session, now)
        return since is not None and is_round_due(since, self.period_seconds, now)

    async def _carry_out(self, collection_id: str) -> None:
        """Workers A and B see the same request; A carries it out; B waits, and then sees that it is over."""
        async with self.database.alone("collections"):
            async with self.database.read() as session:
                row = await operations.get(session, collection_id)
            if row is None or row.status != "RUNNING":
                return
            request = CollectionRequest.model_validate(row.request)
            grace = self.grace_seconds if request.grace_seconds is None else request.grace_seconds
            collected = Collected()
            failure: ErrorBody | None = None
            try:
                collected = await self.collector.collect(
                    grace_seconds=grace, dry_run=request.dry_run, only_orphans=request.orphans
                )
            except BdnError as error:
                failure = body_of(error)
            except Exception as error:
                # A bug must not end the mirror, nor may the next start retry it.
                logger.exception("collection failed", extra={"collection": collection_id})
                failure = body_of(InternalError(f"{type(error).__name__} while collecting"))
            if not request.dry_run:
                self.on_collected(sum(collected.bytes.values()))
            kinds = [
                CollectedKind(kind=kind, count=collected.counts[kind], bytes=collected.bytes[kind]).model_dump()
                for kind in KINDS
            ]
            await self.operations.answer(collection_id, {"kinds": kinds}, failure)
        facts: dict[str, object] = {kind: count for kind, count in collected.counts.items() if count}
        logger.info("collected", extra={"collection": collection_id, "dry_run": request.dry_run, **facts})
