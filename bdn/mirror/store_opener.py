"""From the store's address to the store."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from bdn.core.errors import InvalidRequestError
from bdn.core.ports import MirrorStore
from bdn.store.directory import DirectoryStore


def open_store(address: str, *, exclusive: bool) -> MirrorStore:
    """The store that ``BDN_STORE`` names. ``exclusive`` says that nobody else writes there, so leftovers may go."""
    url = urlsplit(address)
    if url.scheme != "file" or not url.path.startswith("/") or url.netloc:
        raise InvalidRequestError(f"BDN_STORE={address!r} is not supported by this version; use file:///absolute/path")
    store = DirectoryStore(Path(unquote(url.path)))
    if exclusive:
        store.clear_incoming()
    return store
