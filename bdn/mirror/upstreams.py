"""The way to upstreams: how the mirror signs in there, what it asks, and how politely."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace

from bdn.mirror.ground import Ground
from bdn.mirror.ingest.survey import Surveyor
from bdn.mirror.upstream.budgets import UpstreamBudgets
from bdn.mirror.upstream.issuer import IdentityIssuer, load_issuer
from bdn.mirror.upstream.metrics import UpstreamMetrics
from bdn.mirror.upstream.retries import Patience, Pause
from bdn.mirror.upstream.secret_table import SecretTable
from bdn.mirror.upstream.secrets import Secrets
from bdn.mirror.upstream.sign_ins import SignIns
from bdn.sources.settings import UpstreamSettings


@dataclass(frozen=True)
class Upstreams:
    """``issuer`` is None where the operator named no address for it."""

    secrets: Secrets
    issuer: IdentityIssuer | None
    patience: Patience
    surveyor: Surveyor

    def planner(self) -> Surveyor:
        """The surveyor of somebody who holds a connection open for the answer."""
        return replace(self.surveyor, asker=self.patience.for_a_caller_who_waits())


async def open_upstreams(ground: Ground, pause: Pause) -> Upstreams:
    """``pause`` waits before one is asked again. Raises ``InvalidRequestError`` when the issuer's keys cannot be used."""
    settings = ground.settings
    secrets = Secrets(settings.secrets_dir, SecretTable(ground.database, ground.keyring))
    issuer = await asyncio.to_thread(load_issuer, settings, ground.clock)
    budgets = UpstreamBudgets(settings.transfers, pause=pause)
    ground.metrics.registry.register(UpstreamMetrics(budgets))
    patience = Patience(pause, budgets=budgets)
    surveyor = Surveyor(
        ground.database,
        SignIns(secrets, issuer),
        UpstreamSettings.from_environment(os.environ, settings.egress, settings.r2_endpoint_url),
        ambient_credentials=settings.auth == "off",
        limit_files=settings.limit_files,
        limit_bytes=settings.limit_bytes,
        clock=ground.clock,
        asker=patience,
    )
    return Upstreams(secrets, issuer, patience, surveyor)
