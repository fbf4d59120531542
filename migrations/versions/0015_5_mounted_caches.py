"""mounted caches: the training caches that an agent's job volumes have mounted"""

import sqlalchemy as sa
from alembic import op

revision = "0015.5"
down_revision = "0015.4"


def upgrade() -> None:
    op.add_column("agents", sa.Column("caches", sa.JSON(), nullable=True))
