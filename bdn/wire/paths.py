"""Names of the HTTP contract that both sides use."""

from __future__ import annotations

from typing import Final, Literal

from bdn.core.digest import Digest

LONGEST_SOURCE: Final = (
    4096  # characters of one that is asked for: SQLite looks for no longer pattern than 50,000 bytes
)
MEDIA_CHUNK: Final = "application/octet-stream"
MEDIA_JSON: Final = "application/json"
MANIFEST_HEADER: Final = "BDN-Manifest"  # of a chunk request: obtain it if you do not hold it, for it is yours
ORGANISATION_HEADER: Final = "BDN-Organisation"  # of an operator's call: for whom, if not for the token's own

DocumentKind = Literal["manifest", "layout"]

SUSPECT_HEADER: Final = "BDN-Suspect"  # of a chunk request: what came of it before was wrong, so look before you send


def chunk_path(digest: Digest) -> str:
    """Where the data plane serves a chunk."""
    return f"/chunks/{digest}"


def document_path(manifest: Digest, kind: DocumentKind) -> str:
    """Where a manifest, or its layout, is served: by the mirror, and by agents that hold it."""
    return f"/manifests/{manifest}" if kind == "manifest" else f"/manifests/{manifest}/layout"


def parse_document_path(path: str) -> tuple[Digest, DocumentKind] | None:
    """The manifest that a request path names, and whether itself or its layout is meant; None for other paths."""
    _, _, below = path.partition("?")[0].partition("/manifests/")
    name, _, rest = below.partition("/")
    digest = parse_chunk_path(f"/chunks/{name}") if path.startswith("/manifests/") else None
    kinds: dict[str, DocumentKind] = {"": "manifest", "layout": "layout"}
    return (digest, kinds[rest]) if digest is not None and rest in kinds else None


def parse_chunk_path(path: str) -> Digest | None:
    """The chunk that a request path names, or None when it names no chunk."""
    prefix, _, text = path.partition("?")[0].rpartition("/")
    if prefix != "/chunks":
        return None
    try:
        return Digest.parse(text.replace("%3A", ":").replace("%3a", ":"))
    except ValueError:
        return None
