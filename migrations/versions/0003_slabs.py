"""slabs: small files rest packed"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "slabs",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_table(
        "slab_scopes",
        sa.Column("slab", sa.String(length=64), nullable=False),
        sa.Column("scope", sa.String(length=300), nullable=False),
        sa.ForeignKeyConstraint(["slab"], ["slabs.digest"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("slab", "scope"),
    )
    op.create_table(
        "slab_slices",
        sa.Column("content", sa.String(length=64), nullable=False),
        sa.Column("slab", sa.String(length=64), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["content"], ["contents.digest"]),
        sa.ForeignKeyConstraint(["slab"], ["slabs.digest"]),
        sa.PrimaryKeyConstraint("content", "slab"),
    )
    op.create_index("ix_slab_slices_slab", "slab_slices", ["slab"])
