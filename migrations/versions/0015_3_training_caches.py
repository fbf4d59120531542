"""training caches: where each project has one, and what it held"""

import sqlalchemy as sa
from alembic import op

revision = "0015.3"
down_revision = "0015.2"


def _project() -> sa.Column[str]:
    return sa.Column("project", sa.String(length=16), nullable=False)


def _cluster() -> sa.Column[str]:
    return sa.Column("cluster", sa.String(length=256), nullable=False)


def upgrade() -> None:
    op.create_table(
        "cache_pins",
        _project(),
        sa.Column("organisation", sa.String(length=256), nullable=False),
        sa.Column("team", sa.String(length=16), nullable=False),
        _cluster(),
        sa.Column("limit_bytes", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.id"]),
        sa.PrimaryKeyConstraint("project"),
    )
    op.create_index("ix_cache_pins_organisation", "cache_pins", ["organisation"])
    op.create_table(
        "cache_directories",
        _project(),
        _cluster(),
        sa.Column("volume", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.id"]),
        sa.PrimaryKeyConstraint("project", "cluster"),
    )
    op.create_table(
        "cache_summaries",
        _project(),
        _cluster(),
        sa.Column("captured_at", sa.Float(precision=53), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("files", sa.BigInteger(), nullable=False),
        sa.Column("packed", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.id"]),
        sa.PrimaryKeyConstraint("project", "cluster"),
    )
