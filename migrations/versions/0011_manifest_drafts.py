"""manifest drafts: a manifest of many files is written in many transactions, and is nobody's until the last one"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "manifest_drafts",
        sa.Column("manifest", sa.String(length=64), nullable=False),
        sa.Column("renewed_at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["manifest"], ["manifests.digest"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("manifest"),
    )
    op.create_index("ix_manifest_drafts_renewed_at", "manifest_drafts", ["renewed_at"])
