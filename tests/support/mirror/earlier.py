"""What a mirror of an earlier version left: its rows and its store, dumped by that version, and put back into any database.

``python -m tests.support.mirror.earlier`` prints the dump of this version; ``dumps/<migration>.json`` holds those of versions that
landed, and stays as it is.
"""

import asyncio
import base64
import json
import os
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any, Final

from sqlalchemy import MetaData, create_engine, select
from sqlalchemy.engine import Connection

from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import mirror_under_test, source, until
from tests.support.network.egress import ALLOW_LOOPBACK

DUMPS: Final = Path(__file__).with_name("dumps")
_LONG_AGO: Final = 1e9  # what is later is a time
KEY: Final = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
MODEL: Final = {  # with a file of two chunks, one of one, and two of a slab
    "weights.bin": b"weights." * 1_100_000, "one.bin": b"one" * 400_000, "config.json": b"{}", "sub/b.txt": b"b",
}  # fmt: skip
EVICTED: Final = {"old.bin": b"old" * 400_000}
LATER: Final = {"later.bin": b"later" * 2_000_000}


async def left(data_dir: Path, hub: Hub) -> None:
    """A mirror's life, in which something of every kind comes to stand in its tables."""
    for name, files in (("model", MODEL), ("evicted", EVICTED), ("later", LATER)):
        hub.repo(f"org/{name}").commit(files)
    async with mirror_under_test(data_dir) as mirror:
        ready = await mirror.ready(source("hf://org/model@main"))
        await mirror.failed(source("hf://org/none"))
        answer = await mirror.http.put("/secrets/team", json={"value": "sesame"})
        assert answer.is_success, answer.text
        holding = {"manifest": ready["sources"][0]["manifest"], "bytes": 5, "held_by": ["job-7"]}
        await FakeAgent(mirror, "n1", holdings=[holding]).beat()
        await mirror.ready(source("hf://org/evicted"))
        evicted = {"source": "hf://org/evicted", "tier": "mirror"}
        assert (await mirror.http.post("/evictions", params={"wait": 20}, json=evicted)).json()["status"] == "DONE"
        prefetch = {"source": "hf://org/model", "nodes": ["n1"]}
        assert (await mirror.http.post("/prefetches", json=prefetch)).status_code == 202
        hub.fail(stall(), origin="cdn")
        await mirror.begin(source("hf://org/later"))
        await until(lambda: hub.log.count(origin="cdn") > 3)  # it is being mirrored when the process ends


def dumped(data_dir: Path) -> dict[str, Any]:
    """Rows by table and the store's files, as JSON."""
    engine, metadata = create_engine(f"sqlite:///{data_dir}/mirror.sqlite"), MetaData()
    metadata.reflect(engine)
    with engine.connect() as connection:
        rows = {
            table.name: [
                {column: _packed(value) if isinstance(value, bytes) else value for column, value in row.items()}
                for row in connection.execute(select(table)).mappings()
            ]
            for table in metadata.sorted_tables
        }
    engine.dispose()
    store = data_dir / "store"
    files = {str(path.relative_to(store)): _packed(path.read_bytes()) for path in store.rglob("*") if path.is_file()}
    return {"rows": {name: found for name, found in rows.items() if found}, "store": files}


def fill(connection: Connection, dump: dict[str, Any]) -> None:
    """Put the rows into a database of the schema that they are from, with times as if it had been left just now."""
    metadata = MetaData()
    metadata.reflect(connection)
    later = time.time() - max(row["created_at"] for row in dump["rows"]["mirrors"])

    def value(found: Any) -> Any:
        return found + later if isinstance(found, float) and found > _LONG_AGO else _unpacked(found)

    for table in metadata.sorted_tables:
        if (rows := dump["rows"].get(table.name)) and table.name != "alembic_version":
            connection.execute(
                table.insert(), [{column: value(found) for column, found in row.items()} for row in rows]
            )


def fill_store(store: Path, dump: dict[str, Any]) -> None:
    for name, content in dump["store"].items():
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_bytes(_unpacked(content))


def _packed(content: bytes) -> dict[str, str]:
    return {"zlib": base64.b64encode(zlib.compress(content, 9)).decode()}


def _unpacked(value: Any) -> Any:
    is_bytes = isinstance(value, dict) and value.keys() == {"zlib"}
    return zlib.decompress(base64.b64decode(value["zlib"])) if is_bytes else value


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Hub() as hub:
        os.environ |= {"HF_ENDPOINT": hub.url, "BDN_EGRESS_ALLOW": ALLOW_LOOPBACK, "BDN_SECRETS_KEY": KEY}
        asyncio.run(left(Path(folder) / "mirror", hub))
        json.dump(dumped(Path(folder) / "mirror"), sys.stdout, indent=1, sort_keys=True)


if __name__ == "__main__":
    main()
