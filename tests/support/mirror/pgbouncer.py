"""A real PgBouncer in transaction mode, in front of a test session's PostgreSQL. ``make debian-tests`` installs it."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import pytest

from tests.support.mirror.postgres import answering, as_nobody
from tests.support.network.ports import free_port

SESSIONS = 10  # of the server, for all clients of a database: who keeps one to himself is missed
_CONFIG = """
[databases]
* = host={host} port={port} user={user} {password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
max_client_conn = 500
default_pool_size = {sessions}
"""


@contextmanager
def pgbouncer(server: str) -> Iterator[str]:
    """The address of ``server`` through it, as ``postgresql://…`` without a database."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("no pgbouncer: install Debian's package, as 'make debian-tests' does")
    there = urlsplit(server)
    with TemporaryDirectory(prefix="bdn-pgbouncer-", dir="/tmp") as name:
        folder, port = Path(name), free_port()
        folder.chmod(0o755)
        password = f"password={there.password}" if there.password else ""
        values = {"host": there.hostname, "port": there.port or 5432, "user": there.username, "password": password}
        (folder / "pgbouncer.ini").write_text(_CONFIG.format(**values, listen_port=port, sessions=SESSIONS))
        process = subprocess.Popen(
            [program, str(folder / "pgbouncer.ini")],
            **as_nobody(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            url = f"postgresql://{there.username}@127.0.0.1:{port}"
            asyncio.run(answering(url))
            yield url
        finally:
            process.kill()
            process.wait()
