"""holdings: a row for each manifest that an agent holds; when an agent left; answers of agents are found without a scan"""

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

_AT_ONCE = 1000


def upgrade() -> None:
    op.add_column("agents", sa.Column("manifests", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("agents", sa.Column("holdings_digest", sa.String(length=64), nullable=True))
    op.add_column("agents", sa.Column("left_at", sa.Float(precision=53), nullable=True))
    # Without rowid, or SQLite would keep each key twice.
    holdings = op.create_table(
        "holdings",
        sa.Column("cluster", sa.String(length=256), nullable=False),
        sa.Column("node", sa.String(length=256), nullable=False),
        sa.Column("manifest", sa.String(length=64), nullable=False),
        sa.Column("in_use", sa.Boolean(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["cluster", "node"], ["agents.cluster", "agents.node"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("cluster", "node", "manifest"),
        sqlite_with_rowid=False,
    )
    connection = op.get_bind()
    agents = sa.Table("agents", sa.MetaData(), autoload_with=connection)
    names = connection.execute(sa.select(agents.c.cluster, agents.c.node)).all()
    for cluster, node in names:
        is_this = sa.and_(agents.c.cluster == cluster, agents.c.node == node)
        rows = list(_rows(cluster, node, connection.execute(sa.select(agents.c.holdings).where(is_this)).scalar()))
        for start in range(0, len(rows), _AT_ONCE):
            connection.execute(holdings.insert(), rows[start : start + _AT_ONCE])
        connection.execute(agents.update().where(is_this).values(manifests=len(rows)))
    op.create_index("ix_holdings_manifest", "holdings", ["manifest"])
    op.create_index(
        "ix_holdings_in_use",
        "holdings",
        ["manifest"],
        sqlite_where=sa.text("in_use = 1"),
        postgresql_where=sa.text("in_use"),
    )
    op.drop_column("agents", "holdings")
    op.drop_index("ix_operation_parts_state", "operation_parts")
    op.create_index("ix_operation_parts_state", "operation_parts", ["state", "operation"])


def _rows(cluster: str, node: str, holdings: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - JSON
    """One for each manifest. What is no digest was never shown with anything, and goes."""
    found = {}
    for holding in holdings or ():
        name, is_digest, digest = str(holding.get("manifest")).partition("b3:")
        if not name and is_digest and len(digest) == 64:
            found[digest] = {key: value for key, value in holding.items() if key != "manifest"}
    for digest, document in sorted(found.items()):
        in_use = bool(document.get("held_by"))
        yield {"cluster": cluster, "node": node, "manifest": digest, "in_use": in_use, "document": document}
