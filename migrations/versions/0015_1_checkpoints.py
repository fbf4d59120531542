"""checkpoints: what jobs pushed, in the name of projects"""

import sqlalchemy as sa
from alembic import op

revision = "0015.1"
down_revision = "0015"


def upgrade() -> None:
    op.create_table(
        "projects",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("organisation", sa.String(length=256), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("organisation", "name"),
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
        sa.Column("details", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("project", "job", "name", "rank"),
    )
    op.create_index("ix_checkpoints_organisation", "checkpoints", ["organisation"])
    op.create_index("ix_checkpoints_manifest", "checkpoints", ["manifest"])
