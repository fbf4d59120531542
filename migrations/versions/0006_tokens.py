"""tokens: organisations with tokens of their own"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
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
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_tokens_digest", "tokens", ["digest"], unique=True)
