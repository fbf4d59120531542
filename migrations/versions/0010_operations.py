"""operations: evictions, prefetches, verifications and collections are rows of one table, with a row for each who answers"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

_MIRROR = ("", "mirror")


def upgrade() -> None:
    operations = op.create_table(
        "operations",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("organisation", sa.String(length=256), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("completed_at", sa.Float(precision=53), nullable=True),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("command", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    parts = op.create_table(
        "operation_parts",
        sa.Column("operation", sa.String(length=64), nullable=False),
        sa.Column("cluster", sa.String(length=256), nullable=False),
        sa.Column("node", sa.String(length=256), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("result", sa.JSON(), nullable=False),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(["operation"], ["operations.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("operation", "cluster", "node"),
    )
    connection = op.get_bind()
    for table, kind in (("evictions", "eviction"), ("verifications", "verification")):
        for row in _rows(connection, table):
            connection.execute(operations.insert(), _operation(row, kind, row["command"]))
            for part in _parts(row):
                connection.execute(parts.insert(), part)
    for row in _rows(connection, "prefetches"):
        connection.execute(operations.insert(), _operation(row, "prefetch", {"mounts": row["mounts"]}))
    for row in _rows(connection, "prefetch_nodes"):
        state = "DONE" if row["state"] == "READY" else row["state"]
        result = {"bytes_total": row["bytes_total"], "bytes_from": row["bytes_from"]}
        connection.execute(
            parts.insert(), _part(row["prefetch"], (row["cluster"], row["node"]), state, result, row["error"])
        )
    for row in _rows(connection, "collections"):
        connection.execute(operations.insert(), _operation(row | {"organisation": None}, "collection", {}))
        state = {"RUNNING": "PENDING"}.get(row["status"], row["status"])
        connection.execute(parts.insert(), _part(row["id"], _MIRROR, state, {"kinds": row["kinds"]}, row["error"]))
    for table in ("prefetch_nodes", "prefetches", "collections", "verifications", "evictions"):
        op.drop_table(table)
    op.create_index("ix_operations_newest", "operations", ["kind", "created_at"])
    op.create_index("ix_operation_parts_state", "operation_parts", ["state"])


def _rows(connection: sa.Connection, table: str) -> Iterator[dict[str, Any]]:
    for row in connection.execute(sa.select(sa.Table(table, sa.MetaData(), autoload_with=connection))):
        yield row._asdict()


def _operation(row: dict[str, Any], kind: str, command: dict[str, Any]) -> dict[str, Any]:
    names = ("id", "organisation", "status", "created_at", "completed_at", "request")
    return {"kind": kind, "command": command, **{name: row[name] for name in names}}


def _parts(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of an eviction or a verification: each who has answered something, or has still to, or will not.

    Who answered that there was nothing was not recorded. What was read together stands with one part.
    """
    answered: defaultdict[tuple[str, str], list[Any]] = defaultdict(list)
    for item in row["items"]:
        answered[_MIRROR if item["tier"] == "mirror" else (item["cluster"], item["node"])].append(item)
    states = dict.fromkeys(answered, "DONE")
    states |= {_named(name): "UNREACHABLE" for name in row["unreachable"]}
    states |= {_named(name): "PENDING" for name in row["pending"]}
    if not states or row["error"] is not None:
        states.setdefault(_MIRROR, "DONE")
    for number, (who, state) in enumerate(sorted(states.items())):
        result: dict[str, Any] = {"items": answered[who]} if who in answered else {}
        if number == 0 and "chunks_read" in row:
            result |= {"chunks_read": row["chunks_read"], "bytes_read": row["bytes_read"]}
        if who == _MIRROR and row.get("cursor") is not None:
            result["cursor"] = row["cursor"]
        is_failed = who == _MIRROR and row["error"] is not None and state == "DONE"
        error = row["error"] if who == _MIRROR else None
        yield _part(row["id"], who, "FAILED" if is_failed else state, result, error)


def _named(name: str) -> tuple[str, str]:
    cluster, _, node = name.rpartition("/")
    return cluster, node


def _part(operation: str, who: tuple[str, str], state: str, result: dict[str, Any], error: object) -> dict[str, Any]:
    place = {"operation": operation, "cluster": who[0], "node": who[1]}
    return {**place, "state": state, "result": result, "error": error}
