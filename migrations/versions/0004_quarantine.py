"""quarantine: wrong content is kept as evidence"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
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
        sa.Column("chunks", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
