"""A slab that is not public ends in a seal, which says whose it is: an agent knows nothing else about a slab that it holds.

Nobody changes a seal, because a slab's name is the digest of all its bytes. A content that happens to end like one is read from
the mirror, which decides by what it knows, and not from other agents: that is all.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from bdn.core.store.scope import PUBLIC, scope_of

_MAGIC: Final = b"\x00BDN slab seal\x00\x01\x00"
SEAL_SIZE: Final = len(_MAGIC) + 16  # bytes


def seal_of(scope: str) -> bytes:
    """What a slab of this scope ends in: nothing, where everybody may read it."""
    return b"" if scope == PUBLIC else _MAGIC + blake3(scope.encode()).digest(16)


def is_closed_to(organisation: str, tail: bytes) -> bool:
    """Whether a chunk that ends in these ``SEAL_SIZE`` bytes is a slab of somebody else."""
    return len(tail) == SEAL_SIZE and tail.startswith(_MAGIC) and tail != seal_of(scope_of(organisation))
