"""Which sources were mirrored before, and count as the same when they are requested again.

``held_in`` and ``note_use_in`` read an embedded database without SQLAlchemy, whose import takes longer than a whole
command that has nothing else to do there. They neither block other processes nor wait for them.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bdn.core.chunk import digest_of
from bdn.core.source.uri import HuggingFaceUri, SourceUri, WeightsSource, parse_source
from bdn.wire.mirror_schema import RECORDED, MirrorSource, body_from

HEAD: Final = "0001.739e11ec"  # the newest migration, with the fingerprint of the tables
USE_SECONDS: Final = 60.0  # a use this soon after the last noted one is not noted


def recall_key(reader: str, wanted: WeightsSource, revision: str | None) -> str | None:
    """The name of a repository's commit, selected by these patterns, for this organisation or team.

    Returns None if nothing can be recalled: the upstream has no revisions, or a revision's content may change.
    """
    if not revision or not isinstance(wanted.source, HuggingFaceUri):
        return None
    patterns = wanted.patterns.allow, wanted.patterns.ignore
    parts = [reader, str(wanted.source).partition("@")[0], revision, *map(list, patterns)]
    return digest_of(json.dumps(parts).encode()).hex


def is_alike(request: Mapping[str, Any], wanted: WeightsSource) -> bool:
    """Whether a recorded request named the same repository or folder and the same patterns, at whatever revision."""
    body = body_from(wanted)
    return (
        request.get("allow_patterns") == body.allow_patterns
        and request.get("ignore_patterns") == body.ignore_patterns
        and _without_revision(parse_source(request["source"])) == _without_revision(wanted.source)
    )


def _without_revision(uri: SourceUri) -> SourceUri:
    return replace(uri, revision=None) if isinstance(uri, HuggingFaceUri) else uri


# --- an embedded database, read without SQLAlchemy ---


class _Row:
    def __init__(self, found: sqlite3.Row) -> None:
        self.request: dict[str, Any] = json.loads(found["request"])
        self.mirrored_at: float = found["mirrored_at"]
        fields = {name: found[name] for name in RECORDED}
        fields |= {"manifest": f"b3:{found['manifest']}", "warnings": json.loads(found["warnings"]), "error": None}
        self.document = MirrorSource.model_validate(fields)


# Newest first, as in ``mirrors.recalled``, ``mirrors.ready_from`` and ``mirrors.published_as``.
_READY: Final = """
SELECT mirror_sources.*, coalesce(mirrors.completed_at, mirrors.created_at) AS mirrored_at
FROM mirror_sources JOIN mirrors ON mirrors.id = mirror_id
WHERE mirror_sources.organisation = :organisation AND mirror_sources.status = 'READY' AND {wanted} = :name
AND EXISTS (SELECT 1 FROM manifests WHERE digest = manifest)
AND NOT EXISTS (SELECT 1 FROM tombstones
    WHERE tombstones.organisation = :organisation AND tombstones.manifest = mirror_sources.manifest)
ORDER BY mirrors.created_at DESC
"""


def held_in(
    file: Path, wanted: WeightsSource, organisation: str, *, is_newest: bool
) -> tuple[MirrorSource, float] | None:
    """What ``MirrorRequests.held`` returns, and when it was mirrored, in seconds since the epoch. Blocking, 10 ms.

    Returns None also if the file cannot answer: absent, damaged, locked or of another version.
    """
    commit = wanted.source.commit if isinstance(wanted.source, HuggingFaceUri) else None
    key = recall_key(organisation, wanted, commit)
    if key is None and not is_newest:
        return None
    column, name = ("source", str(wanted.source)) if key is None else ("recall_key", key)
    with suppress(sqlite3.Error, ValueError), _opened(file) as database:
        if database.execute("SELECT 1 FROM chunks WHERE damage IS NOT NULL").fetchone():
            return None  # the mirror checks whether the damage concerns this source
        for row in _ready(database, organisation, column, name):
            if is_alike(row.request, wanted):
                return row.document, row.mirrored_at
    return None


def is_update_in(file: Path, manifest: str, wanted: WeightsSource, organisation: str) -> bool:
    """What ``MirrorRequests.is_update`` returns; False also if the file cannot answer. Blocking."""
    with suppress(sqlite3.Error, ValueError), _opened(file) as database:
        return any(is_alike(row.request, wanted) for row in _ready(database, organisation, "manifest", manifest))
    return False


def _ready(database: sqlite3.Connection, organisation: str, column: str, name: str) -> Iterator[_Row]:
    return map(_Row, database.execute(_READY.format(wanted=column), {"organisation": organisation, "name": name}))


def note_use_in(file: Path, manifest: str, now: float) -> None:
    """What ``manifests.note_use`` does, for a manifest that ``held_in`` returned; its digest as hex.

    Skipped while another process writes: only eviction needs the order of uses, and the next use will be noted.
    """
    noted = "UPDATE manifests SET last_used = ? WHERE digest = ? AND last_used <= ?"
    with suppress(sqlite3.Error), _opened(file) as database:
        database.execute(noted, (now, manifest, now - USE_SECONDS))


@contextmanager
def _opened(file: Path) -> Iterator[sqlite3.Connection]:
    """Raises ``sqlite3.Error`` if the file is absent, of another version, or cannot be read now."""
    place = f"{file.absolute().as_uri()}?mode=rw"  # does not create the file
    with closing(sqlite3.connect(place, uri=True, timeout=0, isolation_level=None)) as database:
        # Does not wait for the disk while it holds the lock: losing a use in a power cut does no harm.
        database.execute("PRAGMA synchronous = NORMAL")
        if database.execute("SELECT version_num FROM alembic_version").fetchall() != [(HEAD,)]:
            raise sqlite3.DatabaseError("the schema is of another version")
        database.row_factory = sqlite3.Row
        yield database
