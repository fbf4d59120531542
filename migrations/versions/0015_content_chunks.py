"""content chunks: which contents a chunk belongs to is found without reading all of them"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"

_AT_ONCE = 1000
_RAW = 32


def upgrade() -> None:
    # Without rowid, or SQLite would keep each key twice.
    content_chunks = op.create_table(
        "content_chunks",
        sa.Column("content", sa.String(length=64), nullable=False),
        sa.Column("chunk", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["content"], ["contents.digest"]),
        sa.PrimaryKeyConstraint("content", "chunk"),
        sqlite_with_rowid=False,
    )
    connection = op.get_bind()
    contents = sa.table("contents", sa.column("digest", sa.String), sa.column("chunks", sa.LargeBinary))
    several = sa.select(contents).where(sa.func.length(contents.c.chunks) > _RAW).order_by(contents.c.digest)
    behind = ""
    while found := connection.execute(several.where(contents.c.digest > behind).limit(_AT_ONCE)).all():
        for content, chunks in found:
            names = sorted({chunks[start : start + _RAW].hex() for start in range(0, len(chunks), _RAW)})
            rows = [{"content": content, "chunk": name} for name in names]
            for start in range(0, len(rows), _AT_ONCE):
                connection.execute(content_chunks.insert(), rows[start : start + _AT_ONCE])
        behind = found[-1].digest
    op.create_index("ix_content_chunks_chunk", "content_chunks", ["chunk"])
