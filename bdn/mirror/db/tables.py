"""The mirror's tables. Times are seconds since the epoch, digests 64 hex digits; JSON columns hold wire forms."""

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
_Id: Final = BigInteger().with_variant(Integer(), "sqlite")  # which autoincrements only this type


class Base(DeclarativeBase):
    type_annotation_map = {float: Float(53), int: BigInteger, Json: JSON, list[Any]: JSON}  # noqa: RUF012 - declarative


class MirrorRow(Base):
    """A request, and the worker on it. The worker renews ``claim_expires_at``; the claim of a dead worker expires.

    ``team`` is the team of a push's project, or of the requesting token; empty if the token has none.
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

    ``organisation`` repeats the mirror's, so that one index lookup decides what may be read. ``recall_key`` names a
    commit with patterns that was published (``recall.recall_key``). ``listing`` is the root of the upstream's listing,
    which the set ``<mirror>/<position>/listing`` retains.
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
    """An object of the store. The row is committed before the object is put, and deleted after the object is gone.

    ``state`` is a ``ChunkState``. ``refs`` counts its rows in ``set_chunks``; the decision to delete reads this row and
    no other. ``changed_at`` is when the last reference was removed, a PUT was due, or the DELETE was sent. ``damage``
    says what a scrub found wrong.
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
        {"sqlite_autoincrement": True},  # ids are never reused
    )

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    digest: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    size: Mapped[int]
    state: Mapped[str] = mapped_column(String(8))
    refs: Mapped[int]
    changed_at: Mapped[float]
    damage: Mapped[str | None]


class ChunkSetRow(Base):
    """Chunks that are retained together.

    ``owner`` is a source of a mirror, a push, or evidence; a published set belongs to a manifest. ``ended_at`` is when
    the set died: chunks without another reference since then are collected after the grace.
    """

    __tablename__ = "chunk_sets"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    owner: Mapped[str] = mapped_column(String(128), index=True)
    state: Mapped[str] = mapped_column(String(16), index=True)
    ended_at: Mapped[float | None]


class SetChunkRow(Base):
    __tablename__ = "set_chunks"
    __table_args__ = ({"sqlite_with_rowid": False},)  # otherwise SQLite stores each key twice

    set_id: Mapped[int] = mapped_column(ForeignKey("chunk_sets.id"), primary_key=True)
    chunk_id: Mapped[int] = mapped_column(ForeignKey("chunks.id"), primary_key=True, index=True)


class ManifestRow(Base):
    """A published manifest, named by the digest of its root, a chunk of its set. ``last_used`` is exact to a minute."""

    __tablename__ = "manifests"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    set_id: Mapped[int] = mapped_column(ForeignKey("chunk_sets.id"), unique=True)
    files_total: Mapped[int]
    bytes_total: Mapped[int]
    created_at: Mapped[float]
    last_used: Mapped[float]


class IdentityRow(Base):
    """What an upstream says of some bytes, and what they were when received: a hint, never a reference.

    ``key`` hashes scope and parts (``Identity``). For a file of 1 MiB or more, ``chunks`` are its raw chunk digests in
    order, 32 zero bytes for each missing one; ``digest`` is the file's, null until it is whole. For a slab, ``digest``
    is the slab's, and ``chunks`` are the raw digests of the files in it. ``first`` is the first chunk, or the slab.
    """

    __tablename__ = "identities"

    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    size: Mapped[int]
    digest: Mapped[bytes | None] = mapped_column(LargeBinary(32), index=True)
    chunks: Mapped[bytes] = mapped_column(LargeBinary)
    first: Mapped[bytes] = mapped_column(LargeBinary(32), index=True)


class QuarantinedFileRow(Base):
    """A file received with wrong content. The set ``evidence:<id>`` retains what was received."""

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

    ``joined_at`` is null while the agent is not a member of its cluster; ``left_at`` is set if that is because it
    announced its departure. ``holdings_digest`` is the agent's own name for the content of ``holdings``, null if it
    gave none; ``manifests`` is their number. ``unsynced_bytes`` counts checkpoints that exist only in the agent's job
    volumes. ``caches`` are the training caches that these volumes have mounted, each a ``CacheUse``. ``capacity`` is a
    ``NodeCapacity``, null if the agent runs no training jobs. ``stages``, each a ``StageReport``, are loaded only where a
    query names them: they change with each heartbeat of a node that stages. ``state_at`` orders the heartbeats of one boot.
    ``replaced`` names the agent that reported as this node before, until ``replaced_at``; if that agent reports again,
    two agents have one name, which is assumed until ``disputed_at``.
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
    capacity: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))
    stages: Mapped[list[Any] | None] = mapped_column(deferred=True, deferred_raiseload=True)
    state_at: Mapped[float | None]
    last_heartbeat: Mapped[float]
    joined_at: Mapped[float | None]
    left_at: Mapped[float | None]
    replaced: Mapped[str | None]
    replaced_at: Mapped[float | None]
    disputed_at: Mapped[float | None]


class HoldingRow(Base):
    """A manifest that an agent holds, in whole or in part.

    ``document`` is a ``Holding`` without its name; ``in_use``: jobs hold it.
    """

    __tablename__ = "holdings"
    __table_args__ = (
        ForeignKeyConstraint(["cluster", "node"], ["agents.cluster", "agents.node"], ondelete="CASCADE"),
        Index("ix_holdings_in_use", "manifest", sqlite_where=text("in_use = 1"), postgresql_where=text("in_use")),
        {"sqlite_with_rowid": False},  # otherwise SQLite stores each key twice
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
    """An eviction, prefetch, verification or collection. ``command`` is what its kind needs beside the request."""

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
    """The share of one agent, or of the mirror (no cluster), in an operation.

    ``state`` is PENDING, RUNNING, DONE, FAILED or UNREACHABLE.
    """

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
    """A token: its SHA-256, never the token itself, and its ``role`` (``Role``).

    An agent's token may be bound to a ``cluster``. A token of a ``team`` sees only what that team has.
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


class PageSessionRow(Base):
    """A log-in to the operator's page: the SHA-256 of its random id, and of the token that began it.

    ``organisation`` is the organisation that an operator acts for.
    """

    __tablename__ = "page_sessions"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    token: Mapped[str] = mapped_column(String(64), index=True)
    organisation: Mapped[str] = mapped_column(String(256))
    created_at: Mapped[float]
    expires_at: Mapped[float] = mapped_column(index=True)


class TeamRow(Base):
    """A team. The id is 10 characters of ``[a-z0-9]``, never reused; other tables refer to the team by name."""

    __tablename__ = "teams"
    __table_args__ = (UniqueConstraint("organisation", "name"),)

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    organisation: Mapped[str] = mapped_column(String(256))
    name: Mapped[str] = mapped_column(String(128))
    created_at: Mapped[float]


class ProjectRow(Base):
    """A project of a team: jobs write checkpoints in its name. The id is 10 characters of ``[a-z0-9]``, never reused.

    A project with a training cache has the team's id in ``cache_team`` and the cluster of its first job with a cache in
    ``cache_cluster``. Without ``cache_limit_bytes`` the setting's limit applies.
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
    """What a rank of a job pushed under a name, in the newest version.

    ``mirror`` is the push of that version, ``manifest`` its content. ``created_at`` is when the first version was
    committed, ``committed_at`` when this one was. ``created_at`` in ``details`` is the date of the first version by the
    job's clock.
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
    """A project's training cache in a cluster, on the volume that the cluster's agents share.

    The columns from ``captured_at`` on describe the agents' last scan, null before the first; ``packed`` is as it was
    sent.
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


class TrainingJobRow(Base):
    """A training job. ``request`` is a ``TrainingJobSpec``, which names secrets and holds no value of one.

    ``status`` is a ``Status`` of ``bdn.core.training.states``, entered at ``since``; ``ending_at`` is when its end was
    requested (``is_stopping``) or decided (``failure``). ``requester_team`` is the team of the token that created it,
    null without one: the job's mirror reads in its name. ``extras`` are sources beside the weights (``ExtraSource``),
    ``ranks`` the placement with what agents reported of it (``RankRecord``). A worker claims the row while it prepares
    the job; the claim of a dead worker expires.
    """

    __tablename__ = "training_jobs"
    __table_args__ = (
        Index("ix_training_jobs_newest", "organisation", "created_at", "id"),
        Index("ix_training_jobs_of_project", "project", "number"),
    )

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    organisation: Mapped[str] = mapped_column(String(256))
    requester_team: Mapped[str | None] = mapped_column(String(128))
    project: Mapped[str] = mapped_column(ForeignKey("projects.id", ondelete="CASCADE"))
    number: Mapped[int]
    name: Mapped[str] = mapped_column(String(256))
    status: Mapped[str] = mapped_column(String(16), index=True)
    since: Mapped[float]
    created_at: Mapped[float]
    updated_at: Mapped[float]
    ending_at: Mapped[float | None]
    is_stopping: Mapped[bool] = mapped_column(default=False)
    failure: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))
    waiting_for: Mapped[str | None]
    priority: Mapped[int]
    availability_model: Mapped[str] = mapped_column(String(256))
    request: Mapped[Json]
    extras: Mapped[list[Any]]
    mirror_id: Mapped[str | None] = mapped_column(String(64))
    cluster: Mapped[str | None] = mapped_column(String(256))
    ranks: Mapped[list[Any]]
    claimed_by: Mapped[str | None] = mapped_column(String(256))
    claim_expires_at: Mapped[float | None]


class TrainingLogRow(Base):
    """A batch of lines of a job's log, as an agent sent it: ``seq`` of ``rank``. Negative ranks are the mirror's own.

    ``packed`` is what ``bdn.mirror.db.training.pack`` makes of the lines. ``first_ns`` and ``last_ns`` are their times
    since the epoch, ``size`` their bytes before packing.
    """

    __tablename__ = "training_logs"
    __table_args__ = (Index("ix_training_logs_times", "job", "last_ns"),)

    job: Mapped[str] = mapped_column(ForeignKey("training_jobs.id", ondelete="CASCADE"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    first_ns: Mapped[int]
    last_ns: Mapped[int]
    lines: Mapped[int]
    size: Mapped[int]
    packed: Mapped[bytes] = mapped_column(LargeBinary)


class TombstoneRow(Base):
    """An organisation gave a manifest up.

    Even after a collection it may not read the manifest unless it mirrors or restores it.
    """

    __tablename__ = "tombstones"

    organisation: Mapped[str] = mapped_column(String(256), primary_key=True)
    manifest: Mapped[str] = mapped_column(String(64), primary_key=True, index=True)
    created_at: Mapped[float]
    eviction: Mapped[str] = mapped_column(String(64))
    collected_at: Mapped[float | None]


class FactRow(Base):
    """Values that exist once.

    ``database`` is the random id of this database, which a store names as its owner; ``scrub`` is the progress of the
    scrub. The claims of ``Database.alone`` are here by their names.
    """

    __tablename__ = "facts"

    name: Mapped[str] = mapped_column(String(16), primary_key=True)
    value: Mapped[Json]


class EventRow(Base):
    """A decision and its reason. ``node`` is null for the mirror's own decisions."""

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
