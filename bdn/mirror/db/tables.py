"""The mirror's tables. Times are seconds since the epoch; digests are the 64 hex digits; JSON columns hold wire forms."""

from typing import Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    String,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Json = dict[str, Any]
_Id: Final = BigInteger().with_variant(Integer(), "sqlite")  # which counts such a column alone


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
    team: Mapped[str] = mapped_column(String(128))


class MirrorSourceRow(Base):
    """One source of a mirror: the request as it was, and the outcome.

    ``organisation`` is the mirror's, so that one look at an index tells what may be read. ``recall_key`` names a commit with
    patterns that was published (``mirrors.recall_key``). ``listing`` is the root of what the upstream listed, which the set
    ``<mirror>/<position>/listing`` keeps.
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
    organisation: Mapped[str] = mapped_column(String(256))
    recall_key: Mapped[str | None] = mapped_column(String(64))
    listing: Mapped[str | None] = mapped_column(String(64))


class ChunkRow(Base):
    """An object of the store. The row is committed before the object's first byte is sent, and deleted after the object has gone.

    ``state`` is a ``ChunkState``. ``refs`` counts its rows in ``set_chunks``; the decision to delete reads this row and no other.
    ``changed_at`` is when the last reference went, the object was to be put, or its DELETE was sent. ``damage`` says what a
    scrub found wrong.
    """

    __tablename__ = "chunks"
    __table_args__ = (
        Index("ix_chunks_unreferenced", "changed_at", sqlite_where=text("refs = 0"), postgresql_where=text("refs = 0")),
        Index(
            "ix_chunks_damaged",
            "id",
            sqlite_where=text("damage IS NOT NULL"),
            postgresql_where=text("damage IS NOT NULL"),
        ),
        {"sqlite_autoincrement": True},  # an id is never used again
    )

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    digest: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    size: Mapped[int]
    state: Mapped[str] = mapped_column(String(8))
    refs: Mapped[int]
    changed_at: Mapped[float]
    damage: Mapped[str | None]


class ChunkSetRow(Base):
    """Chunks that are kept together. ``owner`` is a source of a mirror, a push, or evidence; a published set is a manifest's.

    ``ended_at`` is since when a dead set refers to nothing: what nothing else referred to since then is collected after the grace.
    """

    __tablename__ = "chunk_sets"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    owner: Mapped[str] = mapped_column(String(128), index=True)
    state: Mapped[str] = mapped_column(String(16), index=True)
    ended_at: Mapped[float | None]


class SetChunkRow(Base):
    """A set refers to a chunk."""

    __tablename__ = "set_chunks"
    __table_args__ = ({"sqlite_with_rowid": False},)  # or SQLite would keep each key twice

    set_id: Mapped[int] = mapped_column(ForeignKey("chunk_sets.id"), primary_key=True)
    chunk_id: Mapped[int] = mapped_column(ForeignKey("chunks.id"), primary_key=True, index=True)


class ManifestRow(Base):
    """A published manifest: its name is the digest of its root, which is a chunk of its set. ``last_used`` is exact to a minute."""

    __tablename__ = "manifests"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    set_id: Mapped[int] = mapped_column(ForeignKey("chunk_sets.id"), unique=True)
    files_total: Mapped[int]
    bytes_total: Mapped[int]
    created_at: Mapped[float]
    last_used: Mapped[float]


class IdentityRow(Base):
    """What an upstream says of some bytes, and what they were when they came: a hint, never a reference.

    ``key`` hashes scope and parts (``Identity``). Of a file of 1 MiB or more ``chunks`` are its raw chunk digests in order, 32 zero
    bytes for each that has not come; ``digest`` is the file's, null until it is whole. Of a slab ``digest`` is the slab's, and
    ``chunks`` are the raw digests of the files in it. ``first`` is the first chunk, or the slab.
    """

    __tablename__ = "identities"

    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    size: Mapped[int]
    digest: Mapped[bytes | None] = mapped_column(LargeBinary(32), index=True)
    chunks: Mapped[bytes] = mapped_column(LargeBinary)
    first: Mapped[bytes] = mapped_column(LargeBinary(32), index=True)


class QuarantinedFileRow(Base):
    """A file that came with the wrong content. What came is kept by the set ``evidence:<id>``."""

    __tablename__ = "quarantined_files"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[float]
    mirror_id: Mapped[str] = mapped_column(String(64))
    source: Mapped[str]
    path: Mapped[str]
    size: Mapped[int]
    expected: Mapped[str]
    actual: Mapped[str]


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
    manifests: Mapped[int] = mapped_column(default=0)
    holdings_digest: Mapped[str | None] = mapped_column(String(64))
    unsynced_bytes: Mapped[int] = mapped_column(default=0)
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
    """A project of a team: jobs write checkpoints in its name. The id is 10 signs of ``[a-z0-9]``, and never another's.

    With a training cache it has the id of the team, and the cluster of its first job that had one; without a limit the setting's holds.
    """

    __tablename__ = "projects"
    __table_args__ = (UniqueConstraint("organisation", "team", "name"),)

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    organisation: Mapped[str] = mapped_column(String(256))
    name: Mapped[str] = mapped_column(String(128))
    created_at: Mapped[float]
    team: Mapped[str] = mapped_column(String(128))
    cache_team: Mapped[str | None] = mapped_column(String(16))
    cache_cluster: Mapped[str | None] = mapped_column(String(256))
    cache_limit_bytes: Mapped[int | None]


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
    is_loadable: Mapped[bool] = mapped_column(default=True)
    details: Mapped[Json]


class CacheDirectoryRow(Base):
    """A project has a training cache in a cluster, on the volume that the cluster's agents share.

    From ``captured_at`` on: what it held when an agent looked last; ``packed`` as it travelled. Null until one has looked.
    """

    __tablename__ = "cache_directories"

    project: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    cluster: Mapped[str] = mapped_column(String(256), primary_key=True)
    volume: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float]
    captured_at: Mapped[float | None]
    size_bytes: Mapped[int | None]
    files: Mapped[int | None]
    packed: Mapped[str | None]


class TombstoneRow(Base):
    """An organisation gave a manifest up, which it may not read unless it mirrors or restores it, also after a collection."""

    __tablename__ = "tombstones"

    organisation: Mapped[str] = mapped_column(String(256), primary_key=True)
    manifest: Mapped[str] = mapped_column(String(64), primary_key=True, index=True)
    created_at: Mapped[float]
    eviction: Mapped[str] = mapped_column(String(64))
    collected_at: Mapped[float | None]


class FactRow(Base):
    """What there is once: the random id of this database (``database``), which a store names as its owner, and how far the scrub is (``scrub``)."""

    __tablename__ = "facts"

    name: Mapped[str] = mapped_column(String(16), primary_key=True)
    value: Mapped[Json]


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
