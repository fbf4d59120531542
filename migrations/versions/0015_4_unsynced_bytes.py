"""unsynced bytes: what of checkpoints an agent's job volumes alone have"""

import sqlalchemy as sa
from alembic import op

revision = "0015.4"
down_revision = "0015.3"


def upgrade() -> None:
    op.add_column("agents", sa.Column("unsynced_bytes", sa.BigInteger(), server_default="0", nullable=False))
