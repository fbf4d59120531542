"""The tables as the code has them, until the first release.

The release writes them out, so that later changes of the code leave this migration as it is: ``alembic revision
--autogenerate`` against an empty database. Until then ``HEAD`` has the fingerprint of the tables, and a database of
another state of development is refused.
"""

from alembic import op

from bdn.mirror.db.recall import HEAD
from bdn.mirror.db.tables import Base

revision = HEAD
down_revision = None


def upgrade() -> None:
    Base.metadata.create_all(op.get_bind())
