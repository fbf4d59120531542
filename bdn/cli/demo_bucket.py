"""The demo's upstream: moto's S3 server in a process of its own, with a bucket that is filled from a folder."""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from bdn.core.errors import UpstreamUnavailableError
from bdn.net.api_server.http_server import bind_tcp

BUCKET: Final = "demo"
KEY_ID: Final = "demo"
_START_SECONDS: Final = 60
HOST: Final = "127.0.0.1"


@contextmanager
def s3_server() -> Iterator[str]:
    """The server's address, until the block ends."""
    with bind_tcp(HOST, 0) as listener:
        port = int(listener.getsockname()[1])
    command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:  # noqa: S603
        try:
            _wait_for(process, port)
            yield f"http://{HOST}:{port}"
        finally:
            process.terminate()


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection(HOST, port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/moto-api/")
            connection.getresponse().read()
            return
        time.sleep(0.05)
    raise UpstreamUnavailableError("the demo's S3 server", "it did not start; is the extra bdn[demo] installed?")


def fill_bucket(url: str, folder: Path) -> None:
    """Put every file of ``folder`` below the prefix ``model/``."""
    netloc = url.removeprefix("http://")
    _put(netloc, f"/{BUCKET}", None)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor(2) as threads:
        list(
            threads.map(
                lambda path: _put(netloc, f"/{BUCKET}/model/{quote(str(path.relative_to(folder)))}", path), files
            )
        )


def _put(netloc: str, target: str, path: Path | None) -> None:
    """A plain PUT: moto takes any signature, so none is computed."""
    headers = {
        "Authorization": f"AWS4-HMAC-SHA256 Credential={KEY_ID}/20260101/us-east-1/s3/aws4_request, "
        "SignedHeaders=host, Signature=0",
        "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
    }
    connection = http.client.HTTPConnection(netloc, timeout=120)
    with contextlib.closing(connection), contextlib.ExitStack() as stack:
        body = stack.enter_context(path.open("rb")) if path else None
        length = path.stat().st_size if path else 0
        connection.request("PUT", target, body=body, headers={**headers, "Content-Length": str(length)})
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise UpstreamUnavailableError("the demo's S3 server", f"status {response.status}: {answer[:200]!r}")
