"""tombstones: what was evicted can be restored for a while, and is collected after that"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "tombstones",
        sa.Column("organisation", sa.String(length=256), nullable=False),
        sa.Column("manifest", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("eviction", sa.String(length=64), nullable=False),
        sa.Column("collected_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("organisation", "manifest"),
    )
    op.create_index("ix_tombstones_manifest", "tombstones", ["manifest"])

    op.create_table(
        "collections",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("completed_at", sa.Float(precision=53), nullable=True),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("kinds", sa.JSON(), nullable=False),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_collections_newest", "collections", ["created_at"])
    op.create_index("ix_collections_status", "collections", ["status"])

    # Chunks that an eviction had still to delete are found by the next collection: no row names them.
    with op.batch_alter_table("evictions", schema=None) as batch_op:
        batch_op.drop_column("doomed")
    for table in ("contents", "copied_chunks"):
        op.add_column(table, sa.Column("recorded_at", sa.Float(precision=53), nullable=False, server_default="0"))
