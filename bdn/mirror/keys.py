"""The key that signs grants: made once, kept in the data directory, readable by the service alone."""

from __future__ import annotations

import os
from pathlib import Path

from bdn.wire.grants import GrantSigner, new_signing_key


def load_signer(data_dir: Path) -> GrantSigner:
    """The signer with this installation's key, which is made when there is none."""
    path = data_dir / "grant-key.pem"
    if not path.exists():
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.touch(mode=0o600)
        partial.write_bytes(new_signing_key())
        # A link never replaces: of two processes that start together, the first one's key stays.
        try:
            path.hardlink_to(partial)
        except FileExistsError:
            pass
        finally:
            partial.unlink()
    return GrantSigner(path.read_bytes())
