"""The store that the settings name, opened with the operator's own keys: those of no organisation."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from bdn.core.store import MirrorStore
from bdn.mirror.settings import MirrorSettings
from bdn.mirror.upstream.sign_ins import OperatorSecrets
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import SourceContext
from bdn.store.opener import open_store, settings_of_store


@asynccontextmanager
async def opened_store(
    settings: MirrorSettings, *, exclusive: bool, clock: Callable[[], float] = time.time
) -> AsyncIterator[MirrorStore]:
    """``BDN_STORE``, until the block ends. ``exclusive`` says that nobody else writes there. Raises what ``open_store`` does."""
    reread = (
        partial(OperatorSecrets(settings.secrets_dir).resolve, settings.store_secret) if settings.store_secret else None
    )
    sign_in = await reread() if reread else None
    upstreams = UpstreamSettings.from_environment(os.environ, settings.egress, settings.r2_endpoint_url)
    where = settings_of_store(upstreams, settings.store_endpoint, settings.store_region)
    context = SourceContext("", where, sign_in, ambient_credentials=True, clock=clock)
    store = await asyncio.to_thread(
        partial(open_store, settings.effective_store, context, exclusive=exclusive, reread=reread)
    )
    try:
        yield store
    finally:
        await asyncio.to_thread(store.close)
