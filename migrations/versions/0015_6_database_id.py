"""database id: by which a store knows the one database that it belongs to"""

import sqlalchemy as sa
from alembic import op

revision = "0015.6"
down_revision = "0015.5"


def upgrade() -> None:
    op.create_table(
        "database_ids",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
