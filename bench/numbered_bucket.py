"""A bucket of very many tiny objects that exist only as numbers: each object holds its number as text.

    with NumberedBucket(200_000) as bucket:
        # s3://numbers/ at bucket.url: data/0000/0000000.txt, data/0000/0000001.txt, …

It answers ListObjectsV2 and GET as S3 does, checks no signatures, and logs every request. Its ETags are MD5s.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qs, quote_plus, unquote

from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.s3_errors import s3_error

NAME = "numbers"
PAGE = 1000
_PER_FOLDER = 1000


class NumberedBucket(Origin):
    """``count`` objects, from ``with`` until its end. Changing ``generation`` changes them all."""

    def __init__(self, count: int) -> None:
        super().__init__("s3", self._respond)
        self.keys = [f"data/{number // _PER_FOLDER:04}/{number:07}.txt" for number in range(count)]
        self.generation = 0

    def content(self, key: str) -> bytes:
        return f"{self.generation} {int(key[-11:-4])}".encode()

    @property
    def bytes_total(self) -> int:
        return sum(len(self.content(key)) for key in self.keys)

    def _respond(self, request: Request) -> Answer:
        _, bucket, *rest = request.url.path.split("/", 2)
        key = unquote("".join(rest))
        if bucket != NAME:
            return s3_error(404, "NoSuchBucket")
        if not key:
            return self._list(parse_qs(request.url.query, keep_blank_values=True))
        at = bisect_left(self.keys, key)
        if self.keys[at : at + 1] != [key]:
            return s3_error(404, "NoSuchKey")
        content = self.content(key)
        etag = _etag(content)
        if request.headers.get("if-match", etag) != etag:
            return s3_error(412, "PreconditionFailed")
        return Answer(200, {"ETag": etag, "Content-Type": "text/plain"}, content, ranged=True)

    def _list(self, query: Mapping[str, list[str]]) -> Answer:
        prefix = query.get("prefix", [""])[0]
        size = min(PAGE, int(query.get("max-keys", [str(PAGE)])[0]))
        start = bisect_left(self.keys, query.get("continuation-token", [prefix])[0])
        stop = start
        while stop < min(start + size, len(self.keys)) and self.keys[stop].startswith(prefix):
            stop += 1
        goes_on = stop < len(self.keys) and self.keys[stop].startswith(prefix)
        following = self.keys[stop] if goes_on else ""
        page = [(key, _etag(self.content(key))[1:-1], len(self.content(key))) for key in self.keys[start:stop]]
        return Answer(200, {"Content-Type": "application/xml"}, listing(NAME, prefix, page, following).encode())


def listing(bucket: str, prefix: str, objects: Sequence[tuple[str, str, int]], following: str) -> str:
    """A page of ListObjectsV2: keys, ETags and sizes; ``following`` is the token of the next page, if there is one."""
    entries = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;{etag}&quot;</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        for key, etag, size in objects
    )
    token = f"<NextContinuationToken>{following}</NextContinuationToken>" if following else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{bucket}</Name><Prefix>{quote_plus(prefix, safe='/')}</Prefix><EncodingType>url</EncodingType>"
        f"<KeyCount>{len(objects)}</KeyCount><MaxKeys>{PAGE}</MaxKeys>"
        f"<IsTruncated>{str(bool(following)).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"
    )


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
