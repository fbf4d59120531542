"""The way to agents: who may read, chunks on the data plane, and the API."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from fastapi import FastAPI

from bdn.mirror.access.access import Access
from bdn.mirror.access.tokens import TokenTable
from bdn.mirror.agents.holdings import Holdings
from bdn.mirror.agents.members import Roll
from bdn.mirror.api.collections import build_collections_router
from bdn.mirror.api.contents import ContentsService, build_contents_router
from bdn.mirror.api.control import Probes, build_control_router
from bdn.mirror.api.events import build_events_router
from bdn.mirror.api.identity import build_identity_router
from bdn.mirror.api.mirrors import build_mirrors_router
from bdn.mirror.api.secrets import build_secrets_router
from bdn.mirror.api.tokens import build_tokens_router
from bdn.mirror.api.verifications import build_verifications_router
from bdn.mirror.ground import Ground
from bdn.mirror.ingest.requests import MirrorRequests
from bdn.mirror.operations.evictions import Evictions
from bdn.mirror.operations.heartbeats import Membership
from bdn.mirror.operations.names import Names
from bdn.mirror.operations.prefetches import Prefetches
from bdn.mirror.operations.verifications import Verifications
from bdn.mirror.retention.restorations import Restorations
from bdn.mirror.retention.store_eviction import StoreEviction
from bdn.mirror.scrub.repair_grants import Lending
from bdn.mirror.served_chunks import StoreShelf
from bdn.mirror.upkeep import Upkeep
from bdn.mirror.upstreams import Upstreams
from bdn.net.api_server.service import new_service
from bdn.net.chunk_server.server import ChunkServer
from bdn.transfer.pacing import pacer
from bdn.wire.grants import GrantVerifier


@dataclass(frozen=True)
class Delivery:
    """``data_port`` is None where this process gives no chunks on a port of their own."""

    tokens: TokenTable
    access: Access
    shelf: StoreShelf
    data_port: int | None


def open_delivery(stack: AsyncExitStack, ground: Ground, *, serve: bool) -> Delivery:
    """Until the stack ends. Raises ``InUseError`` when another has the data port."""
    settings = ground.settings
    tokens = TokenTable(ground.database, ground.clock)
    token = settings.token if settings.auth == "token" else None
    access = Access(token, tokens, GrantVerifier([ground.signer.public_key]), ground.database)
    shelf = StoreShelf(ground.store, access, ground.damages, asyncio.get_running_loop())
    return Delivery(tokens, access, shelf, _open_data_plane(stack, ground, shelf) if serve else None)


def _open_data_plane(stack: AsyncExitStack, ground: Ground, shelf: StoreShelf) -> int:
    """Chunks for agents, on a port of their own."""
    settings = ground.settings
    sent, pace = ground.metrics.served_bytes.inc, pacer(settings.upload_rate)
    server = ChunkServer(shelf, settings.host, settings.data_port, on_sent=sent, pace=pace)
    # Not on the loop: a worker may be waiting for what it asked of the loop.
    stack.push_async_callback(asyncio.to_thread, server.close)
    server.start()
    return server.port


def build_api(
    ground: Ground, upstreams: Upstreams, upkeep: Upkeep, delivery: Delivery, requests: MirrorRequests
) -> FastAPI:
    """Every service that a caller may ask, and its routes."""
    settings, database, clock, watch = ground.settings, ground.database, ground.clock, ground.watch
    signer, events, access = ground.signer, upkeep.events, delivery.access
    store_eviction = StoreEviction(database, upkeep.collector, settings.tombstone_seconds, clock)
    evictions = Evictions(database, store_eviction, watch, clock)
    prefetches = Prefetches(database, signer, settings.grant_seconds, watch)
    verifications = Verifications(database, watch, Lending(database, signer, settings.grant_seconds), clock)
    roll = Roll(database, clock)
    membership = Membership(database, roll, evictions, prefetches, verifications, events, signer, watch, clock)
    contents = ContentsService(
        database, access, delivery.shelf, ground.suspects, Holdings(database), delivery.data_port
    )
    api = new_service("BDN mirror", limit_request_bytes=settings.limit_request_bytes)
    api.state.access = access  # for the routes' callers, see api/callers.py
    for router in (
        build_mirrors_router(requests),
        build_contents_router(contents),
        build_control_router(evictions, prefetches, membership),
        build_verifications_router(verifications),
        build_events_router(events, Names(database)),
        build_collections_router(upkeep.collections, Restorations(database, clock)),
        build_secrets_router(upstreams.secrets),
        build_tokens_router(delivery.tokens),
        build_identity_router(upstreams.issuer),
        Probes(database, ground.store, ground.metrics).router(),
    ):
        api.include_router(router)
    return api
