"""loadable checkpoints: which ones a project's or a job's name alone means"""

import sqlalchemy as sa
from alembic import op

revision = "0015.7"
down_revision = "0015.6"


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("is_loadable", sa.Boolean(), server_default=sa.true(), nullable=False))
