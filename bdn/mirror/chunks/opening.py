"""Opens the store that the settings name, with the operator's own keys, never with an organisation's."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from bdn.core.errors import InvalidRequestError
from bdn.core.store import MirrorStore
from bdn.mirror.settings import MirrorSettings
from bdn.mirror.upstream.sign_ins import infrastructure_secret
from bdn.sources.sign_in import SourceContext
from bdn.store.opener import open_store, settings_of_store


def check_secret_files(settings: MirrorSettings) -> None:
    """Reject key files of the mirror in the folder of secrets that a source can name. Blocking."""
    if settings.secrets_dir is None:
        return
    folder = settings.secrets_dir.resolve()
    files = {name: getattr(settings, name) for name in ("tls_key", "grant_key_file", "identity_key_file")}
    if config := os.environ.get("BDN_CONFIG"):
        files["config"] = Path(config)
    parents = {name: path.parent for name, path in files.items() if path is not None}
    for name, parent in {**parents, "data_dir": settings.data_dir}.items():
        if parent.resolve() == folder:
            raise InvalidRequestError(
                f"BDN_{name.upper()}={files.get(name, parent)} is in BDN_SECRETS_DIR, where a source could name it as its "
                "secret; move it elsewhere, such as into a folder below that directory"
            )


async def check_owner(settings: MirrorSettings, own: str, store: MirrorStore) -> None:
    """Reject the store of another database: each would delete chunks of the other. A store without an owner gets one.

    ``own`` is the id of this mirror's database.

    Raises ``InvalidRequestError``.
    """
    owner = await asyncio.to_thread(store.owner, own)
    if owner != own:
        raise InvalidRequestError(
            f"BDN_STORE={settings.effective_store} belongs to another mirror database (its owner is {owner or 'unreadable'}, this database is "
            f"{own}). Two databases on one store delete each other's chunks. Give this mirror a store of its own; or, "
            "if the other database is gone for good, run 'bdn-admin store adopt' with this mirror's settings"
        )


@asynccontextmanager
async def opened_store(
    settings: MirrorSettings, *, exclusive: bool, clock: Callable[[], float] = time.time
) -> AsyncIterator[MirrorStore]:
    """Open ``BDN_STORE`` until the block ends. ``exclusive``: no other process writes there.

    Raises what ``open_store`` does.
    """
    reread = None
    if settings.store_secret:
        reread = partial(infrastructure_secret, settings.secrets_dir, "BDN_STORE_SECRET", settings.store_secret)
    sign_in = await reread() if reread else None
    upstreams = settings.upstreams
    where = settings_of_store(upstreams, settings.store_endpoint, settings.store_region)
    context = SourceContext("", where, sign_in, ambient_credentials=True, clock=clock)
    store = await asyncio.to_thread(
        partial(open_store, settings.effective_store, context, exclusive=exclusive, reread=reread)
    )
    try:
        yield store
    finally:
        await asyncio.to_thread(store.close)
