"""The mirror's tables. Times are seconds since the epoch; digests are the 64 hex digits; JSON columns hold wire forms."""

from typing import Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    String,
    UniqueConstraint,
    text,
    true,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Json = dict[str, Any]
_DEFAULT_TEAM: Final = text("'Default'")  # what the version before writes is of this team


class Base(DeclarativeBase):
    """All tables."""

    type_annotation_map = {float: Float(53), int: BigInteger, Json: JSON, list[Any]: JSON}  # noqa: RUF012 - declarative


class MirrorRow(Base):
    """A request, and who works on it. ``claim_expires_at`` is renewed by the worker; a dead one's claim runs out.

    ``team`` is that of a push's project, or of the token that asked; empty: of a token that has none.
    """

    __tablename__ = "mirrors"
    __table_args__ = (
        Index(
            "ix_mirrors_one_running",
            "organisation",
            "request_key",
            unique=True,
            sqlite_where=text("status IN ('PENDING', 'SYNCING')"),
            postgresql_where=text("status IN ('PENDING', 'SYNCING')"),
        ),
        Index("ix_mirrors_newest", "organisation", "created_at", "id"),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    organisation: Mapped[str] = mapped_column(String(256))
    request_key: Mapped[str] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(16), index=True)
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    completed_at: Mapped[float | None]
    claimed_by: Mapped[str | None] = mapped_column(String(256))
    claim_expires_at: Mapped[float | None]
    error: Mapped[Json | None]
    team: Mapped[str] = mapped_column(String(128), server_default=_DEFAULT_TEAM)


class MirrorSourceRow(Base):
    """One source of a mirror: the request as it was, and the outcome.

    ``organisation`` is the mirror's, so that one look at an index tells what may be read. ``recall_key`` names a commit with
    patterns that was published (``mirrors.recall_key``).
    """

    __tablename__ = "mirror_sources"
    __table_args__ = (
        Index("ix_mirror_sources_readable", "organisation", "manifest"),
        Index("ix_mirror_sources_recalled", "recall_key", "manifest"),
    )

    mirror_id: Mapped[str] = mapped_column(ForeignKey("mirrors.id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    request: Mapped[Json]
    source: Mapped[str] = mapped_column(index=True)
    mount_location: Mapped[str]
    status: Mapped[str] = mapped_column(String(16))
    resolved_revision: Mapped[str | None]
    manifest: Mapped[str | None] = mapped_column(String(64), index=True)
    files_total: Mapped[int | None]
    bytes_total: Mapped[int | None]
    bytes_transferred: Mapped[int] = mapped_column(default=0)
    bytes_reused: Mapped[int] = mapped_column(default=0)
    warnings: Mapped[list[Any]]
    error: Mapped[Json | None]
    organisation: Mapped[str] = mapped_column(String(256), server_default=text("''"))
    recall_key: Mapped[str | None] = mapped_column(String(64))


class ManifestRow(Base):
    """A published manifest. Its row is not changed: on SQLite that would write all of its bytes, 130 MB of a million files.

    ``last_used`` is when it was published, or used last before there were ``ManifestUseRow``s.
    """

    __tablename__ = "manifests"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    canonical: Mapped[bytes] = mapped_column(LargeBinary)
    files_total: Mapped[int]
    bytes_total: Mapped[int]
    created_at: Mapped[float]
    last_used: Mapped[float]


class ManifestUseRow(Base):
    """When a manifest was used last since it was published, give or take a minute."""

    __tablename__ = "manifest_uses"

    manifest: Mapped[str] = mapped_column(ForeignKey("manifests.digest", ondelete="CASCADE"), primary_key=True)
    last_used: Mapped[float]


class DraftRow(Base):
    """A manifest that nobody can read: it is being written, was left half-written, or is being collected (``renewed_at`` 0)."""

    __tablename__ = "manifest_drafts"

    manifest: Mapped[str] = mapped_column(ForeignKey("manifests.digest", ondelete="CASCADE"), primary_key=True)
    renewed_at: Mapped[float] = mapped_column(index=True)


class ContentRow(Base):
    """A file, complete in the store. ``chunks`` are its raw chunk digests; none: it rests in slabs, see ``SlabSliceRow``."""

    __tablename__ = "contents"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    size: Mapped[int]
    chunks: Mapped[bytes] = mapped_column(LargeBinary)
    recorded_at: Mapped[float] = mapped_column(server_default="0")


class ContentChunkRow(Base):
    """A chunk of a content that has several: who has the chunk finds the content. One of a single chunk is named like that."""

    __tablename__ = "content_chunks"
    __table_args__ = ({"sqlite_with_rowid": False},)  # or SQLite would keep each key twice

    content: Mapped[str] = mapped_column(ForeignKey("contents.digest"), primary_key=True)
    chunk: Mapped[str] = mapped_column(String(64), primary_key=True, index=True)


class SlabRow(Base):
    """A chunk that holds small files one after the other."""

    __tablename__ = "slabs"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    size: Mapped[int]


class SlabScopeRow(Base):
    """Whose files a slab was packed from: ``public`` or ``organisation:<name>``, or several. They may read it as a whole."""

    __tablename__ = "slab_scopes"

    slab: Mapped[str] = mapped_column(ForeignKey("slabs.digest", ondelete="CASCADE"), primary_key=True)
    scope: Mapped[str] = mapped_column(String(300), primary_key=True)


class SlabSliceRow(Base):
    """Where in a slab a content lies. One content may have slices in slabs of several scopes."""

    __tablename__ = "slab_slices"

    content: Mapped[str] = mapped_column(ForeignKey("contents.digest"), primary_key=True)
    slab: Mapped[str] = mapped_column(ForeignKey("slabs.digest"), primary_key=True, index=True)
    offset: Mapped[int]


class ManifestContentRow(Base):
    """Which contents a manifest names."""

    __tablename__ = "manifest_contents"

    manifest: Mapped[str] = mapped_column(ForeignKey("manifests.digest", ondelete="CASCADE"), primary_key=True)
    content: Mapped[str] = mapped_column(ForeignKey("contents.digest"), primary_key=True, index=True)


class IdentityRow(Base):
    """An upstream identity that maps to a content we computed. ``key`` hashes scope and parts."""

    __tablename__ = "identities"

    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    content: Mapped[str] = mapped_column(ForeignKey("contents.digest"), index=True)


class CopiedChunkRow(Base):
    """A chunk of a file that is still being copied, durable in the store: what a restarted worker does not fetch again."""

    __tablename__ = "copied_chunks"

    identity: Mapped[str] = mapped_column(String(64), primary_key=True)
    chunk_index: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(String(64))
    recorded_at: Mapped[float] = mapped_column(server_default="0")


class QuarantinedFileRow(Base):
    """A file that came with the wrong content. ``chunks`` is the concatenation of the raw digests of what came."""

    __tablename__ = "quarantined_files"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[float]
    mirror_id: Mapped[str] = mapped_column(String(64))
    source: Mapped[str]
    path: Mapped[str]
    size: Mapped[int]
    expected: Mapped[str]
    actual: Mapped[str]
    chunks: Mapped[bytes] = mapped_column(LargeBinary)


class AgentRow(Base):
    """An agent, as its last heartbeat described it.

    ``joined_at`` is null while it is no member of its cluster; ``left_at`` is set while that is so because it said that it
    leaves. ``holdings_digest`` is the agent's own name for what is in ``holdings``, null where it gave none, and ``manifests``
    how many they are. ``unsynced_bytes`` are of checkpoints that its job volumes alone have. ``caches`` are the training caches
    that these have mounted, each a ``CacheUse``. ``replaced`` names the agent that reported as this node before, until
    ``replaced_at``; when that one speaks again, two agents have one name, which is the case until ``disputed_at`` is past.
    """

    __tablename__ = "agents"

    cluster: Mapped[str] = mapped_column(String(256), primary_key=True)
    node: Mapped[str] = mapped_column(String(256), primary_key=True)
    boot_id: Mapped[str]
    roles: Mapped[list[Any]]
    advertise: Mapped[str | None]
    version: Mapped[str]
    tiers: Mapped[Json]
    manifests: Mapped[int] = mapped_column(server_default="0")
    holdings_digest: Mapped[str | None] = mapped_column(String(64))
    unsynced_bytes: Mapped[int] = mapped_column(server_default="0")
    caches: Mapped[list[Any] | None]
    last_heartbeat: Mapped[float]
    joined_at: Mapped[float | None]
    left_at: Mapped[float | None]
    replaced: Mapped[str | None]
    replaced_at: Mapped[float | None]
    disputed_at: Mapped[float | None]


class HoldingRow(Base):
    """A manifest that an agent holds something of. ``document`` is a ``Holding`` without its name; ``in_use``: it is held by jobs."""

    __tablename__ = "holdings"
    __table_args__ = (
        ForeignKeyConstraint(["cluster", "node"], ["agents.cluster", "agents.node"], ondelete="CASCADE"),
        Index("ix_holdings_in_use", "manifest", sqlite_where=text("in_use = 1"), postgresql_where=text("in_use")),
        {"sqlite_with_rowid": False},  # or SQLite would keep each key twice
    )

    cluster: Mapped[str] = mapped_column(String(256), primary_key=True)
    node: Mapped[str] = mapped_column(String(256), primary_key=True)
    manifest: Mapped[str] = mapped_column(String(64), primary_key=True, index=True)
    in_use: Mapped[bool]
    document: Mapped[Json]


class ClusterRow(Base):
    """A cluster's membership: ``epoch`` grows whenever an agent joins, leaves, or becomes another."""

    __tablename__ = "clusters"

    cluster: Mapped[str] = mapped_column(String(256), primary_key=True)
    epoch: Mapped[int]


class OperationRow(Base):
    """An eviction, prefetch, verification or collection. ``command`` is what its kind has to remember beside the request."""

    __tablename__ = "operations"
    __table_args__ = (Index("ix_operations_newest", "kind", "created_at"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    organisation: Mapped[str | None] = mapped_column(String(256))
    status: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[float]
    completed_at: Mapped[float | None]
    request: Mapped[Json]
    command: Mapped[Json]


class OperationPartRow(Base):
    """What an agent that was asked did, or the mirror (no cluster): PENDING, RUNNING, DONE, FAILED or UNREACHABLE."""

    __tablename__ = "operation_parts"
    __table_args__ = (Index("ix_operation_parts_state", "state", "operation"),)

    operation: Mapped[str] = mapped_column(ForeignKey("operations.id", ondelete="CASCADE"), primary_key=True)
    cluster: Mapped[str] = mapped_column(String(256), primary_key=True)
    node: Mapped[str] = mapped_column(String(256), primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    result: Mapped[Json]
    error: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))


class SecretRow(Base):
    """A secret of an organisation, encrypted; the key is not in the database."""

    __tablename__ = "secrets"

    organisation: Mapped[str] = mapped_column(String(256), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    ciphertext: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[float]
    updated_at: Mapped[float]


class TokenRow(Base):
    """A token: its SHA-256, since nobody keeps the token, and its ``role`` (``Role``), for an agent in one cluster.

    One of a ``team`` sees what that one has alone.
    """

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    organisation: Mapped[str] = mapped_column(String(256))
    name: Mapped[str] = mapped_column(String(256))
    role: Mapped[str] = mapped_column(String(16))
    cluster: Mapped[str | None] = mapped_column(String(256))
    digest: Mapped[str] = mapped_column(String(64), index=True, unique=True)
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    team: Mapped[str | None] = mapped_column(String(128))


class TeamRow(Base):
    """A team of an organisation. The id is 10 signs of ``[a-z0-9]``, and never another's; other tables name it by its name."""

    __tablename__ = "teams"
    __table_args__ = (UniqueConstraint("organisation", "name"),)

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    organisation: Mapped[str] = mapped_column(String(256))
    name: Mapped[str] = mapped_column(String(128))
    created_at: Mapped[float]


class ProjectRow(Base):
    """A project of a team: jobs write checkpoints in its name. The id is 10 signs of ``[a-z0-9]``, and never another's."""

    __tablename__ = "projects"
    __table_args__ = (UniqueConstraint("organisation", "team", "name"),)

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    organisation: Mapped[str] = mapped_column(String(256))
    name: Mapped[str] = mapped_column(String(128))
    created_at: Mapped[float]
    team: Mapped[str] = mapped_column(String(128), server_default=_DEFAULT_TEAM)


class CheckpointRow(Base):
    """What a rank of a job pushed under a name, as it is now. ``mirror`` is the push that brought it, ``manifest`` what it holds.

    ``created_at`` is when the mirror got its first version, ``committed_at`` when it got this one. ``created_at`` in ``details`` is what
    the job's clock says of the first version.
    """

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("project", "job", "name", "rank"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    organisation: Mapped[str] = mapped_column(String(256), index=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    job: Mapped[str] = mapped_column(String(128))
    name: Mapped[str] = mapped_column(String(255))
    rank: Mapped[int]
    mirror: Mapped[str] = mapped_column(String(64))
    manifest: Mapped[str] = mapped_column(String(64), index=True)
    created_at: Mapped[float]
    committed_at: Mapped[float]
    files_total: Mapped[int]
    bytes_total: Mapped[int]
    is_loadable: Mapped[bool] = mapped_column(server_default=true())
    details: Mapped[Json]


class CachePinRow(Base):
    """A project's training cache, and the cluster of its first job that had one. ``team`` is an id; without a limit the setting's holds."""

    __tablename__ = "cache_pins"

    project: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    organisation: Mapped[str] = mapped_column(String(256), index=True)
    team: Mapped[str] = mapped_column(String(16))
    cluster: Mapped[str] = mapped_column(String(256))
    limit_bytes: Mapped[int | None]
    created_at: Mapped[float]


class CacheDirectoryRow(Base):
    """A project has a training cache in a cluster, on the volume that the cluster's agents share."""

    __tablename__ = "cache_directories"

    project: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    cluster: Mapped[str] = mapped_column(String(256), primary_key=True)
    volume: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float]


class CacheSummaryRow(Base):
    """What a training cache held when an agent looked last; ``packed`` as it travelled."""

    __tablename__ = "cache_summaries"

    project: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    cluster: Mapped[str] = mapped_column(String(256), primary_key=True)
    captured_at: Mapped[float]
    size_bytes: Mapped[int]
    files: Mapped[int]
    packed: Mapped[str]


class TombstoneRow(Base):
    """An organisation gave a manifest up, which it may not read unless it mirrors or restores it, also after a collection."""

    __tablename__ = "tombstones"

    organisation: Mapped[str] = mapped_column(String(256), primary_key=True)
    manifest: Mapped[str] = mapped_column(String(64), primary_key=True, index=True)
    created_at: Mapped[float]
    eviction: Mapped[str] = mapped_column(String(64))
    collected_at: Mapped[float | None]


class DamagedChunkRow(Base):
    """A chunk or slab that the store does not hold as its name says. Whoever has seen it there again removes the row."""

    __tablename__ = "damaged_chunks"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    found_at: Mapped[float]
    reason: Mapped[str]


class DamagedContentRow(Base):
    """A content of which a chunk is damaged: it counts as half-copied. Those in damaged slabs are found by their slices."""

    __tablename__ = "damaged_contents"

    content: Mapped[str] = mapped_column(ForeignKey("contents.digest", ondelete="CASCADE"), primary_key=True)
    chunk: Mapped[str] = mapped_column(
        ForeignKey("damaged_chunks.digest", ondelete="CASCADE"), primary_key=True, index=True
    )


class ScrubRow(Base):
    """How far the scrub of the store is: one row. ``cursor`` is null between two rounds."""

    __tablename__ = "scrubs"

    name: Mapped[str] = mapped_column(String(16), primary_key=True)
    started_at: Mapped[float]
    completed_at: Mapped[float | None]
    cursor: Mapped[str | None]


class DatabaseIdRow(Base):
    """The random id of this database: one row. A store names it as its owner."""

    __tablename__ = "database_ids"

    name: Mapped[str] = mapped_column(String(16), primary_key=True)
    id: Mapped[str] = mapped_column(String(64))


class EventRow(Base):
    """Something that was decided, and why. ``node`` is null for the mirror's own decisions."""

    __tablename__ = "events"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    at: Mapped[float] = mapped_column(index=True)
    organisation: Mapped[str | None] = mapped_column(String(256))
    cluster: Mapped[str | None] = mapped_column(String(256))
    node: Mapped[str | None] = mapped_column(String(256))
    kind: Mapped[str] = mapped_column(String(64))
    manifest: Mapped[str | None] = mapped_column(String(64), index=True)
    digest: Mapped[str | None] = mapped_column(String(64), index=True)
    facts: Mapped[Json]
