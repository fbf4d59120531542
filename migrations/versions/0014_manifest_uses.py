"""manifest uses: when a manifest was used last stands beside it, because a change of its own row writes all of its bytes"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "manifest_uses",
        sa.Column("manifest", sa.String(length=64), nullable=False),
        sa.Column("last_used", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["manifest"], ["manifests.digest"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("manifest"),
    )
