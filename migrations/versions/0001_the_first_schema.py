"""the first schema"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "agents",
        sa.Column("cluster", sa.String(length=256), nullable=False),
        sa.Column("node", sa.String(length=256), nullable=False),
        sa.Column("boot_id", sa.String(), nullable=False),
        sa.Column("roles", sa.JSON(), nullable=False),
        sa.Column("advertise", sa.String(), nullable=True),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("tiers", sa.JSON(), nullable=False),
        sa.Column("manifests", sa.BigInteger(), nullable=False),
        sa.Column("holdings_digest", sa.String(length=64), nullable=True),
        sa.Column("unsynced_bytes", sa.BigInteger(), nullable=False),
        sa.Column("caches", sa.JSON(), nullable=True),
        sa.Column("state_at", sa.Float(precision=53), nullable=True),
        sa.Column("last_heartbeat", sa.Float(precision=53), nullable=False),
        sa.Column("joined_at", sa.Float(precision=53), nullable=True),
        sa.Column("left_at", sa.Float(precision=53), nullable=True),
        sa.Column("replaced", sa.String(), nullable=True),
        sa.Column("replaced_at", sa.Float(precision=53), nullable=True),
        sa.Column("disputed_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("cluster", "node"),
    )
    op.create_table(
        "chunk_sets",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("ended_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_chunk_sets_owner"), "chunk_sets", ["owner"], unique=False)
    op.create_index(op.f("ix_chunk_sets_state"), "chunk_sets", ["state"], unique=False)
    op.create_table(
        "chunks",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("refs", sa.BigInteger(), nullable=False),
        sa.Column("changed_at", sa.Float(precision=53), nullable=False),
        sa.Column("damage", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("digest"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_chunks_damaged",
        "chunks",
        ["id"],
        unique=False,
        sqlite_where=sa.text("damage IS NOT NULL"),
        postgresql_where=sa.text("damage IS NOT NULL"),
    )
    op.create_index(
        "ix_chunks_unreferenced",
        "chunks",
        ["changed_at"],
        unique=False,
        sqlite_where=sa.text("refs = 0"),
        postgresql_where=sa.text("refs = 0"),
    )
    op.create_table(
        "clusters",
        sa.Column("cluster", sa.String(length=256), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("cluster"),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("organisation", sa.String(length=256), nullable=True),
        sa.Column("cluster", sa.String(length=256), nullable=True),
        sa.Column("node", sa.String(length=256), nullable=True),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("manifest", sa.String(length=64), nullable=True),
        sa.Column("digest", sa.String(length=64), nullable=True),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_events_at"), "events", ["at"], unique=False)
    op.create_index(op.f("ix_events_digest"), "events", ["digest"], unique=False)
    op.create_index(op.f("ix_events_manifest"), "events", ["manifest"], unique=False)
    op.create_table(
        "facts",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("value", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "identities",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=32), nullable=True),
        sa.Column("chunks", sa.LargeBinary(), nullable=False),
        sa.Column("first", sa.LargeBinary(length=32), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_index(op.f("ix_identities_digest"), "identities", ["digest"], unique=False)
    op.create_index(op.f("ix_identities_first"), "identities", ["first"], unique=False)
    op.create_table(
        "mirrors",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("organisation", sa.String(length=256), nullable=False),
        sa.Column("request_key", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("started_at", sa.Float(precision=53), nullable=True),
        sa.Column("completed_at", sa.Float(precision=53), nullable=True),
        sa.Column("claimed_by", sa.String(length=256), nullable=True),
        sa.Column("claim_expires_at", sa.Float(precision=53), nullable=True),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("team", sa.String(length=128), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_mirrors_newest", "mirrors", ["organisation", "created_at", "id"], unique=False)
    op.create_index(
        "ix_mirrors_one_running",
        "mirrors",
        ["organisation", "request_key"],
        unique=True,
        sqlite_where=sa.text("status IN ('PENDING', 'SYNCING')"),
        postgresql_where=sa.text("status IN ('PENDING', 'SYNCING')"),
    )
    op.create_index(op.f("ix_mirrors_status"), "mirrors", ["status"], unique=False)
    op.create_table(
        "operations",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("organisation", sa.String(length=256), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("completed_at", sa.Float(precision=53), nullable=True),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("command", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_operations_newest", "operations", ["kind", "created_at"], unique=False)
    op.create_table(
        "projects",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("organisation", sa.String(length=256), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("team", sa.String(length=128), nullable=False),
        sa.Column("cache_team", sa.String(length=16), nullable=True),
        sa.Column("cache_cluster", sa.String(length=256), nullable=True),
        sa.Column("cache_limit_bytes", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("organisation", "team", "name"),
    )
    op.create_table(
        "quarantined_files",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("mirror_id", sa.String(length=64), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("expected", sa.String(), nullable=False),
        sa.Column("actual", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "secrets",
        sa.Column("organisation", sa.String(length=256), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("ciphertext", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("updated_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("organisation", "name"),
    )
    op.create_table(
        "teams",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("organisation", sa.String(length=256), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("organisation", "name"),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("organisation", sa.String(length=256), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("cluster", sa.String(length=256), nullable=True),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("expires_at", sa.Float(precision=53), nullable=True),
        sa.Column("revoked_at", sa.Float(precision=53), nullable=True),
        sa.Column("team", sa.String(length=128), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_tokens_digest"), "tokens", ["digest"], unique=True)
    op.create_table(
        "tombstones",
        sa.Column("organisation", sa.String(length=256), nullable=False),
        sa.Column("manifest", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("eviction", sa.String(length=64), nullable=False),
        sa.Column("collected_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("organisation", "manifest"),
    )
    op.create_index(op.f("ix_tombstones_manifest"), "tombstones", ["manifest"], unique=False)
    op.create_table(
        "cache_directories",
        sa.Column("project", sa.String(length=16), nullable=False),
        sa.Column("cluster", sa.String(length=256), nullable=False),
        sa.Column("volume", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("captured_at", sa.Float(precision=53), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=True),
        sa.Column("files", sa.BigInteger(), nullable=True),
        sa.Column("packed", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(
            ["project"],
            ["projects.id"],
        ),
        sa.PrimaryKeyConstraint("project", "cluster"),
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("organisation", sa.String(length=256), nullable=False),
        sa.Column("project", sa.String(length=16), nullable=False),
        sa.Column("job", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("mirror", sa.String(length=64), nullable=False),
        sa.Column("manifest", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("committed_at", sa.Float(precision=53), nullable=False),
        sa.Column("files_total", sa.BigInteger(), nullable=False),
        sa.Column("bytes_total", sa.BigInteger(), nullable=False),
        sa.Column("is_loadable", sa.Boolean(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project"],
            ["projects.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("project", "job", "name", "rank"),
    )
    op.create_index(op.f("ix_checkpoints_manifest"), "checkpoints", ["manifest"], unique=False)
    op.create_index(op.f("ix_checkpoints_organisation"), "checkpoints", ["organisation"], unique=False)
    op.create_table(
        "holdings",
        sa.Column("cluster", sa.String(length=256), nullable=False),
        sa.Column("node", sa.String(length=256), nullable=False),
        sa.Column("manifest", sa.String(length=64), nullable=False),
        sa.Column("in_use", sa.Boolean(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["cluster", "node"], ["agents.cluster", "agents.node"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("cluster", "node", "manifest"),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "ix_holdings_in_use",
        "holdings",
        ["manifest"],
        unique=False,
        sqlite_where=sa.text("in_use = 1"),
        postgresql_where=sa.text("in_use"),
    )
    op.create_index(op.f("ix_holdings_manifest"), "holdings", ["manifest"], unique=False)
    op.create_table(
        "manifests",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("set_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("files_total", sa.BigInteger(), nullable=False),
        sa.Column("bytes_total", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("last_used", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(
            ["set_id"],
            ["chunk_sets.id"],
        ),
        sa.PrimaryKeyConstraint("digest"),
        sa.UniqueConstraint("set_id"),
    )
    op.create_table(
        "mirror_sources",
        sa.Column("mirror_id", sa.String(length=64), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("mount_location", sa.String(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("resolved_revision", sa.String(), nullable=True),
        sa.Column("manifest", sa.String(length=64), nullable=True),
        sa.Column("files_total", sa.BigInteger(), nullable=True),
        sa.Column("bytes_total", sa.BigInteger(), nullable=True),
        sa.Column("bytes_transferred", sa.BigInteger(), nullable=False),
        sa.Column("bytes_reused", sa.BigInteger(), nullable=False),
        sa.Column("warnings", sa.JSON(), nullable=False),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("organisation", sa.String(length=256), nullable=False),
        sa.Column("recall_key", sa.String(length=64), nullable=True),
        sa.Column("listing", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(["mirror_id"], ["mirrors.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("mirror_id", "position"),
    )
    op.create_index(op.f("ix_mirror_sources_manifest"), "mirror_sources", ["manifest"], unique=False)
    op.create_index("ix_mirror_sources_readable", "mirror_sources", ["organisation", "manifest"], unique=False)
    op.create_index("ix_mirror_sources_recalled", "mirror_sources", ["recall_key", "manifest"], unique=False)
    op.create_index(op.f("ix_mirror_sources_source"), "mirror_sources", ["source"], unique=False)
    op.create_table(
        "operation_parts",
        sa.Column("operation", sa.String(length=64), nullable=False),
        sa.Column("cluster", sa.String(length=256), nullable=False),
        sa.Column("node", sa.String(length=256), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("result", sa.JSON(), nullable=False),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(["operation"], ["operations.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("operation", "cluster", "node"),
    )
    op.create_index("ix_operation_parts_state", "operation_parts", ["state", "operation"], unique=False)
    op.create_table(
        "set_chunks",
        sa.Column("set_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("chunk_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.ForeignKeyConstraint(
            ["chunk_id"],
            ["chunks.id"],
        ),
        sa.ForeignKeyConstraint(
            ["set_id"],
            ["chunk_sets.id"],
        ),
        sa.PrimaryKeyConstraint("set_id", "chunk_id"),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_set_chunks_chunk_id"), "set_chunks", ["chunk_id"], unique=False)
