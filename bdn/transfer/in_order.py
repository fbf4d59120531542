"""Reads a file whose server ignores ``Range``: ranges in order, from one answer with the whole file."""

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from bdn.core.chunk import ByteRange
from bdn.core.errors import SourceChangedError
from bdn.core.source.upstream import Checksum, Location
from bdn.net.http1.answer import Answer
from bdn.net.http1.pool import NETWORK_ERRORS
from bdn.transfer.ranged import RangedReader, RangeRead, RangeRequest, check_head, other_size, plain_etag


class InOrderReader:
    """Reads one file; ``with`` closes its connection. One range at a time, each after the one before it.

    Between two ranges the connection stays open and nothing is received, so a file needs only one range's buffer. After
    a failure the next range begins a new answer; the bytes before the range are received again and dropped.
    """

    def __init__(self, ranges: RangedReader) -> None:
        self._ranges = ranges
        self._open = ExitStack()
        self._answer: Answer | None = None
        self._etag: str | None = None  # of the first answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the answer, and its connection if the body was not read to its end."""
        self._answer = None
        self._open.close()

    def read_into(
        self,
        location: Location,
        request: RangeRequest,
        buffer: memoryview,
        goes_on: Callable[[int], bool] | None = None,
    ) -> Checksum | None:
        """Fill ``buffer`` with the range; see ``RangedReader.read_into``.

        Also raises ``SourceChangedError`` if the ETag differs from the first answer's.
        """
        whole = RangeRequest(request.source, request.path, ByteRange(0, request.size), request.size)
        reading = RangeRead(self._ranges, location, whole, buffer, goes_on or (lambda _: True))
        try:
            self._read(reading, request.range)
        except NETWORK_ERRORS as error:
            self.close()
            reading.fail(error)
        except BaseException:
            self.close()
            raise
        return None

    def _read(self, reading: RangeRead, wanted: ByteRange) -> None:
        answer = self._answer
        if answer is None or answer.received > wanted.start:
            self.close()
            answer = self._answer = self._begin(reading)
        while (before := wanted.start - answer.received) > 0:
            self._receive(reading, answer, reading.buffer[:before], lambda: reading.goes_on(0))
        start = answer.received
        self._receive(reading, answer, reading.buffer, lambda: reading.goes_on(answer.received - start))
        reading.goes_on(wanted.size)
        if wanted.stop == reading.request.size:
            if not answer.has_ended():
                raise other_size(reading.request, "the answer is longer")
            self.close()

    def _begin(self, reading: RangeRead) -> Answer:
        headers = dict(reading.location.headers)
        answer = self._open.enter_context(reading.answered(headers, len(reading.buffer)))
        check_head(answer, reading.location, reading.request, None)
        etag = plain_etag(answer.headers)
        if self._etag not in (None, etag):
            raise SourceChangedError(reading.request.source, reading.request.path, "its ETag changed")
        self._etag = etag
        return answer

    def _receive(self, reading: RangeRead, answer: Answer, part: memoryview, is_wanted: Callable[[], bool]) -> None:
        if answer.fill(part, self._ranges.stall, self._ranges.clock, is_wanted) == len(part):
            return
        if "transfer-encoding" in answer.headers:  # such a body states its end, so the file ends here
            raise other_size(reading.request, f"is {answer.received}")
        raise ConnectionResetError(f"the answer ended after {answer.received} of {reading.request.size} bytes")
