"""A RangedReader with an upstream to read from, which can be made to fail."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field

from bdn.core.chunk import ByteRange
from bdn.core.pace.retry import ResumePolicy
from bdn.core.source.upstream import Location
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.ranged import RangedReader, RangeRequest
from tests.doubles.faults import Script
from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.request_log import RequestLog

ONCE = ResumePolicy(resumes=0)  # one request, whatever comes of it

SOURCE = "s3://bucket/weights"
CONTENT = bytes(range(256)) * 16
SIZE = len(CONTENT)
ETAG = '"v1"'


def whole_file(_: Request) -> Answer:
    """What a sound upstream answers to everything."""
    return Answer(200, {"ETag": ETAG, "Accept-Ranges": "bytes"}, CONTENT, ranged=True)


@dataclass
class Upstream:
    """``origin`` is asked first; ``other`` is another origin, for redirects. ``heard`` is every request, in order."""

    origin: Origin
    other: Origin
    script: Script
    log: RequestLog
    reader: RangedReader
    heard: list[Request]
    respond: dict[str, Callable[[Request], Answer]] = field(default_factory=dict)

    def read(
        self,
        start: int,
        stop: int,
        *,
        path: str = "/file",
        etag: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        """The bytes [start, stop) of ``path`` at ``origin``."""
        location = Location(self.origin.url + path, tuple((headers or {}).items()), etag)
        return read_range(self.reader, location, start, stop)


def read_range(reader: RangedReader, location: Location, start: int, stop: int, size: int = SIZE) -> bytes:
    """The bytes, through a buffer that was full of others."""
    buffer = bytearray(b"\xee" * (stop - start))
    reader.read_into(location, RangeRequest(SOURCE, "file", ByteRange(start, stop), size), memoryview(buffer))
    return bytes(buffer)


@contextmanager
def upstream(resume: ResumePolicy = ONCE) -> Iterator[Upstream]:
    """Two origins that serve the file under every path, unless ``respond`` or ``script`` say otherwise."""
    script, log, heard = Script(), RequestLog(), list[Request]()

    def responder(request: Request) -> Answer:
        heard.append(request)
        return made.respond.get(request.target, whole_file)(request)

    with ExitStack() as stack:
        pool = stack.enter_context(closing(ConnectionPool(timeout_seconds=10)))
        origin, other = (
            stack.enter_context(Origin(name, responder, log=log, script=script)) for name in ("origin", "other")
        )
        made = Upstream(origin, other, script, log, RangedReader(pool, resume), heard)
        yield made
