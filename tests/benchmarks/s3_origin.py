"""An S3 server that is not the limit: nginx, serving files with ranges and a listing that was written beforehand.

It checks no signatures. Its ETags are those of nginx (time and size), so they are no MD5, as those of real uploads in parts
are none; and it tells each object's CRC64NVME, as S3 does for what its clients upload today.
"""

import base64
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from awscrt.checksums import crc64nvme

from tests.benchmarks import nginx

PAGE = 1000
BUCKET = "bench"
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
def serving(folders: dict[str, tuple[int, int]]) -> Iterator[Origin]:
    """``folders``: how many objects, and of how many bytes, below each prefix."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "listings").mkdir()
        with (root / "checksums").open("w") as checksums:
            for folder, (count, size) in folders.items():
                for path in _fill(root / "objects" / BUCKET / folder, count, size):
                    crc = base64.b64encode(_checksum(path).to_bytes(8, "big")).decode()
                    checksums.write(f'"/{BUCKET}/{folder}/{path.name}" "{crc}";\n')
                _list(root, folder)
        with nginx.serving(_SERVER.format(root=root, bucket=BUCKET), _MAPS.format(root=root)) as url:
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
        is_last = start + PAGE >= len(paths)
        following = "" if is_last else f"<NextContinuationToken>t{page + 1}</NextContinuationToken>"
        (root / "listings" / f"{folder}-t{page}.xml").write_text(
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{folder}/</Prefix><MaxKeys>{PAGE}</MaxKeys>"
            f"<IsTruncated>{'false' if is_last else 'true'}</IsTruncated>{following}"
            + "".join(_entry(folder, path) for path in paths[start : start + PAGE])
            + "</ListBucketResult>"
        )


def _entry(folder: str, path: Path) -> str:
    told = path.stat()
    etag = escape(f'"{int(told.st_mtime):x}-{told.st_size:x}"', {'"': "&quot;"})
    return (
        f"<Contents><Key>{folder}/{path.name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>{etag}</ETag><Size>{told.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )
