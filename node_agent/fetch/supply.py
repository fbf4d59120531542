"""Where a fill's chunks come from, as the fill sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

from bdn.core.digest import Digest
from bdn.wire.eviction_schema import Tier

Came = Mapping[Tier, int]  # bytes of one chunk by the tier that they came from


class Supply(Protocol):
    """Chunks for one fill, verified, and the word from which tiers each came."""

    def fetch(self, digest: Digest, buffer: memoryview, keep: Callable[[], None]) -> Came:
        """Fill ``buffer`` with the chunk, and call ``keep`` once to put it where this node serves it from.

        Whoever waits for this chunk elsewhere on the node looks for it as soon as ``keep`` returns. Blocking; called from
        byte threads. Raises ``BdnError``, and what ``keep`` raises.
        """
        ...


def chunk_base(api_url: str, data_port: int | None) -> str:
    """The address of a service's data plane: its own host with another port, or its own address."""
    if data_port is None:
        return api_url
    parts = urlsplit(api_url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return urlunsplit((parts.scheme, f"{host}:{data_port}", "", "", ""))
