"""What somebody who is no operator may evict: what its organisation has on the mirror, and nothing from nodes.

The caches of nodes belong to all organisations together: an eviction there by age or of everything would take from others,
one by a job's name could name another's, and a forced one breaks leases of jobs that nobody asked.
"""

from __future__ import annotations

from bdn.core.caller import Caller, NotPermittedError, Role
from bdn.wire.eviction_schema import EvictionRequest


def check_confined(caller: Caller, request: EvictionRequest) -> None:
    """Raises ``NotPermittedError``, before anything is looked up."""
    if caller.role is Role.OPERATOR:
        return
    if request.tier != "mirror" or request.force:
        raise NotPermittedError(
            f"a token of role {caller.role} evicts with tier mirror and without force; the caches of nodes are the operator's"
        )
