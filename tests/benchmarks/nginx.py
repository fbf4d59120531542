"""nginx in front of a folder: the server that is not the limit, and that ours is compared with."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.network.ports import free_port
from tests.support.services.commands import wait_until

_CONFIGURATION = """
{user} worker_processes 2; daemon off; pid {own}/pid; error_log {own}/error.log;
events {{ worker_connections 4096; }}
http {{
    access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000; default_type application/octet-stream;
    client_body_temp_path {own}/body; proxy_temp_path {own}/proxy; fastcgi_temp_path {own}/fastcgi;
    uwsgi_temp_path {own}/uwsgi; scgi_temp_path {own}/scgi;
    types {{ application/xml xml; }}
    {maps}
    server {{ listen 127.0.0.1:{port}; {server} }}
}}
"""


@contextmanager
def serving(server: str, maps: str = "") -> Iterator[str]:
    """Its address. ``server`` is what stands in the block of that name, such as ``root /folder;``."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, "nginx is not installed; `make bench` installs it with apt"
    port = free_port()
    with tempfile.TemporaryDirectory() as own:
        file = Path(own) / "nginx.conf"
        user = "user root;" if os.geteuid() == 0 else ""
        file.write_text(_CONFIGURATION.format(user=user, own=own, port=port, maps=maps, server=server))
        process = subprocess.Popen([program, "-c", file, "-e", f"{own}/error.log"])
        try:
            wait_until(lambda: _answers(port), what="nginx")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=60)


def _answers(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
