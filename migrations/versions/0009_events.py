"""events: what was decided, and why"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("organisation", sa.String(length=256), nullable=True),
        sa.Column("cluster", sa.String(length=256), nullable=True),
        sa.Column("node", sa.String(length=256), nullable=True),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("manifest", sa.String(length=64), nullable=True),
        sa.Column("digest", sa.String(length=64), nullable=True),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_events_manifest", "events", ["manifest"])
    op.create_index("ix_events_digest", "events", ["digest"])
    op.create_index("ix_events_at", "events", ["at"])
