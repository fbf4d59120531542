"""verifications: what the store and the caches hold is read again, and repaired"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "verifications",
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
        sa.Column("cursor", sa.String(), nullable=True),
        sa.Column("chunks_read", sa.BigInteger(), nullable=False),
        sa.Column("bytes_read", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_verifications_status", "verifications", ["status"])

    op.create_table(
        "damaged_chunks",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("found_at", sa.Float(precision=53), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )

    op.create_table(
        "damaged_contents",
        sa.Column("content", sa.String(length=64), nullable=False),
        sa.Column("chunk", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["chunk"], ["damaged_chunks.digest"], ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["content"], ["contents.digest"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("content", "chunk"),
    )
    op.create_index("ix_damaged_contents_chunk", "damaged_contents", ["chunk"])

    op.create_table(
        "scrubs",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("started_at", sa.Float(precision=53), nullable=False),
        sa.Column("completed_at", sa.Float(precision=53), nullable=True),
        sa.Column("cursor", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("name"),
    )
