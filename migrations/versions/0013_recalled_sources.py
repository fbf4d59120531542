"""mirror_sources: whose they are, and the key by which a commit is found that was published before"""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op
from blake3 import blake3

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column(
        "mirror_sources", sa.Column("organisation", sa.String(length=256), nullable=False, server_default=sa.text("''"))
    )
    op.add_column("mirror_sources", sa.Column("recall_key", sa.String(length=64), nullable=True))
    sources = sa.table(
        "mirror_sources",
        *(sa.column(name) for name in ("mirror_id", "position", "organisation", "source", "status", "recall_key")),
        sa.column("resolved_revision"),
        sa.column("request", sa.JSON()),
    )
    mirrors = sa.table("mirrors", sa.column("id"), sa.column("organisation"))
    whose = sa.select(mirrors.c.organisation).where(mirrors.c.id == sources.c.mirror_id).scalar_subquery()
    op.execute(sources.update().values(organisation=whose))
    connection = op.get_bind()
    ready = sources.select().where(sources.c.status == "READY", sources.c.resolved_revision.is_not(None))
    for row in connection.execute(ready).mappings().all():
        this = sa.and_(sources.c.mirror_id == row["mirror_id"], sources.c.position == row["position"])
        connection.execute(sources.update().where(this).values(recall_key=_recall_key(row)))
    op.create_index("ix_mirror_sources_readable", "mirror_sources", ["organisation", "manifest"])
    op.create_index("ix_mirror_sources_recalled", "mirror_sources", ["recall_key", "manifest"])
    op.drop_index("ix_mirror_sources_revision", "mirror_sources")


def _recall_key(row: Any) -> str:  # noqa: ANN401 - a row
    """As it was computed at this revision."""
    request = row["request"]
    patterns = [request.get("allow_patterns") or [], request.get("ignore_patterns") or []]
    parts = [row["organisation"], row["source"].partition("@")[0], row["resolved_revision"], *patterns]
    return blake3(json.dumps(parts).encode()).hexdigest()
