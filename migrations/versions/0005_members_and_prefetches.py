"""members and prefetches: a cluster's members stand with the agents; manifests are placed on nodes"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("agents", sa.Column("joined_at", sa.Float(precision=53), nullable=True))
    op.add_column("agents", sa.Column("replaced", sa.String(), nullable=True))
    op.add_column("agents", sa.Column("replaced_at", sa.Float(precision=53), nullable=True))
    op.add_column("agents", sa.Column("disputed_at", sa.Float(precision=53), nullable=True))
    with op.batch_alter_table("clusters", schema=None) as batch_op:
        batch_op.drop_column("members")

    op.create_table(
        "prefetches",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("organisation", sa.String(length=256), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("completed_at", sa.Float(precision=53), nullable=True),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("mounts", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "prefetch_nodes",
        sa.Column("prefetch", sa.String(length=64), nullable=False),
        sa.Column("cluster", sa.String(length=256), nullable=False),
        sa.Column("node", sa.String(length=256), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("bytes_total", sa.BigInteger(), nullable=True),
        sa.Column("bytes_from", sa.JSON(), nullable=False),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["prefetch"], ["prefetches.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("prefetch", "cluster", "node"),
    )
    op.create_index("ix_prefetch_nodes_state", "prefetch_nodes", ["state"])
