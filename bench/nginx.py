"""nginx: the server that is not the limit, and that ours is compared with; in front of a folder, or as an S3 server.

The S3 server has ranges and listings that were written beforehand, and checks no signatures. Its ETags are those of
nginx (time and size), so they are no MD5, as those of real uploads in parts are none; and it tells each object's
CRC64NVME, as S3 does for what its clients upload today.
"""

import base64
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from awscrt.checksums import crc64nvme

from bench.numbered_bucket import PAGE, listing
from tests.support.network.ports import free_port
from tests.support.services.commands import wait_until

BUCKET = "bench"
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


_MAPS = """
    map_hash_max_size 262144; map_hash_bucket_size 256;
    map $args $page {{ default t0; "~continuation-token=(?<t>t[0-9]+)" $t; }}
    map $args $folder {{ default none; "~prefix=(?<p>[a-z]+)" $p; }}
    map $uri $crc64 {{ default ""; include {root}/checksums; }}
"""
_SERVER = """
    root {root}/objects;
    add_header x-amz-checksum-crc64nvme $crc64; add_header x-amz-checksum-type FULL_OBJECT;
    location = /{bucket} {{ root {root}/listings; rewrite ^ /$folder-$page.xml break; }}
    location = /{bucket}/ {{ root {root}/listings; rewrite ^ /$folder-$page.xml break; }}
"""


@dataclass(frozen=True)
class Origin:
    """A running server, and the objects that it serves."""

    url: str
    bucket: Path

    def folder(self, prefix: str) -> Path:
        """The objects below a prefix."""
        return self.bucket / prefix


@contextmanager
def serving_s3(folders: dict[str, tuple[int, int]]) -> Iterator[Origin]:
    """An S3 server. ``folders``: how many objects, and of how many bytes, below each prefix."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "listings").mkdir()
        with (root / "checksums").open("w") as checksums:
            for folder, (count, size) in folders.items():
                for path in _fill(root / "objects" / BUCKET / folder, count, size):
                    crc = base64.b64encode(_checksum(path).to_bytes(8, "big")).decode()
                    checksums.write(f'"/{BUCKET}/{folder}/{path.name}" "{crc}";\n')
                _list(root, folder)
        with serving(_SERVER.format(root=root, bucket=BUCKET), _MAPS.format(root=root)) as url:
            yield Origin(url, root / "objects" / BUCKET)


def _fill(folder: Path, count: int, size: int) -> Iterator[Path]:
    folder.mkdir(parents=True)
    block = os.urandom(min(size, 1024**2))
    for number in range(count):
        path = folder / f"part-{number:06}.bin"
        with path.open("wb") as file:
            for piece in range(size // len(block)):
                file.write((number * size + piece).to_bytes(8, "big") + block[8:])
        yield path


def _checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(8 * 1024**2):
            crc = crc64nvme(piece, crc)
    return crc


def _list(root: Path, folder: str) -> None:
    paths = sorted((root / "objects" / BUCKET / folder).iterdir())
    for page, start in enumerate(range(0, len(paths), PAGE)):
        following = f"t{page + 1}" if start + PAGE < len(paths) else ""
        entries = [_entry(folder, path) for path in paths[start : start + PAGE]]
        text = listing(BUCKET, f"{folder}/", entries, following)
        (root / "listings" / f"{folder}-t{page}.xml").write_text(text)


def _entry(folder: str, path: Path) -> tuple[str, str, int]:
    told = path.stat()
    return f"{folder}/{path.name}", f"{int(told.st_mtime):x}-{told.st_size:x}", told.st_size
