"""Keys that this installation makes once and keeps in its data directory, readable by the service alone."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from bdn.disk.durable import sync_folder
from bdn.wire.grants import GrantSigner, new_signing_key


def load_signer(data_dir: Path) -> GrantSigner:
    """The signer of grants with this installation's key."""
    return GrantSigner(kept_key(data_dir / "grant-key.pem", new_signing_key))


def kept_key(path: Path, new: Callable[[], bytes]) -> bytes:
    """The key in this file, which is made when there is none. Blocking."""
    if not path.exists():
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        partial.touch(mode=0o600, exist_ok=False)
        with partial.open("wb") as file:
            file.write(new())
            file.flush()
            os.fsync(file.fileno())
        # A link never replaces: of two that start together, the first one's key stays.
        try:
            path.hardlink_to(partial)
        except FileExistsError:
            pass
        finally:
            partial.unlink()
        sync_folder(path.parent)  # grants that were given out stay good, whatever becomes of the power
    return path.read_bytes()
