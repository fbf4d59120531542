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
        sa.Column("holdings", sa.JSON(), nullable=False),
        sa.Column("last_heartbeat", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "node"),
    )
    op.create_table(
        "clusters",
        sa.Column("cluster", sa.String(length=256), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("members", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("cluster"),
    )
    op.create_table(
        "contents",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("chunks", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_table(
        "copied_chunks",
        sa.Column("identity", sa.String(length=64), nullable=False),
        sa.Column("chunk_index", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("identity", "chunk_index"),
    )
    op.create_table(
        "evictions",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("organisation", sa.String(length=256), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("completed_at", sa.Float(precision=53), nullable=True),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("command", sa.JSON(), nullable=False),
        sa.Column("items", sa.JSON(), nullable=False),
        sa.Column("pending", sa.JSON(), nullable=False),
        sa.Column("unreachable", sa.JSON(), nullable=False),
        sa.Column("doomed", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_evictions_status", "evictions", ["status"])

    op.create_table(
        "manifests",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("canonical", sa.LargeBinary(), nullable=False),
        sa.Column("files_total", sa.BigInteger(), nullable=False),
        sa.Column("bytes_total", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("last_used", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )
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
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_mirrors_newest", "mirrors", ["organisation", "created_at", "id"])
    op.create_index(
        "ix_mirrors_one_running",
        "mirrors",
        ["organisation", "request_key"],
        unique=True,
        sqlite_where=sa.text("status IN ('PENDING', 'SYNCING')"),
        postgresql_where=sa.text("status IN ('PENDING', 'SYNCING')"),
    )
    op.create_index("ix_mirrors_status", "mirrors", ["status"])

    op.create_table(
        "identities",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("content", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["content"], ["contents.digest"]),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_index("ix_identities_content", "identities", ["content"])

    op.create_table(
        "manifest_contents",
        sa.Column("manifest", sa.String(length=64), nullable=False),
        sa.Column("content", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["content"], ["contents.digest"]),
        sa.ForeignKeyConstraint(["manifest"], ["manifests.digest"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("manifest", "content"),
    )
    op.create_index("ix_manifest_contents_content", "manifest_contents", ["content"])

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
        sa.ForeignKeyConstraint(["mirror_id"], ["mirrors.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("mirror_id", "position"),
    )
    op.create_index("ix_mirror_sources_manifest", "mirror_sources", ["manifest"])
    op.create_index("ix_mirror_sources_revision", "mirror_sources", ["resolved_revision"])
    op.create_index("ix_mirror_sources_source", "mirror_sources", ["source"])
