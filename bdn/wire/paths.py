"""Names of the HTTP contract that both sides use."""

from __future__ import annotations

from typing import Final

from bdn.core.digest import Digest

MEDIA_CHUNK: Final = "application/octet-stream"
MEDIA_JSON: Final = "application/json"
MANIFEST_HEADER: Final = "BDN-Manifest"  # of a chunk request: obtain it if you do not hold it, for it is yours


def chunk_path(digest: Digest) -> str:
    """Where the data plane serves a chunk."""
    return f"/chunks/{digest}"


def parse_chunk_path(path: str) -> Digest | None:
    """The chunk that a request path names, or None when it names no chunk."""
    prefix, _, text = path.partition("?")[0].rpartition("/")
    if prefix != "/chunks":
        return None
    try:
        return Digest.parse(text.replace("%3A", ":").replace("%3a", ":"))
    except ValueError:
        return None
