"""Uploads of one object each, for clients of S3: ``/v1/blobs/credentials/train`` and the endpoint below ``/uploads/``.

The endpoint is an application beside the API, because its bodies are bytes, its answers are XML, and its credential is
a session token. Signatures of requests (SigV4) are not checked.
"""

import asyncio
import base64
import binascii
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Header, Request, Response
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from bdn.core.chunk import CHUNK_SIZE, EMPTY, Digest, digest_of
from bdn.core.errors import (
    BdnError,
    ChecksumMismatchError,
    GrantExpiredError,
    GrantInvalidError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
    StoreUnavailableError,
)
from bdn.core.pace.retry import StallPolicy, StallWindow
from bdn.core.source.upstream import Checksum, ChecksumKind
from bdn.mirror.api.callers import TeamController
from bdn.mirror.jobs.archives import PART_RULE, Archives
from bdn.net.api_server import new_router, provided
from bdn.net.chunk_server.receiving import ReceiveBuffers
from bdn.net.chunk_server.served_chunks import PushedChunk, ReceivedChunks
from bdn.net.request_bodies import CLOSE, KNOW, UNTIMED, answer_early, has_body
from bdn.transfer.checksums import RunningChecksum
from bdn.wire import s3_uploads
from bdn.wire.grants import GrantVerifier, UploadGrant
from bdn.wire.http_fields import FORWARDED_HOST_HEADER
from bdn.wire.s3_uploads import AwsChunked
from bdn.wire.shapes import status_of
from bdn.wire.upload_schema import UploadCredentials, UploadKeys

UPLOADS: Final = "/uploads/"
_BUCKET: Final = "uploads"
_SLOWEST: Final = StallPolicy(window_seconds=30.0)  # as on the data plane
_LIST_BYTES: Final = 256 * 1024  # of a ``CompleteMultipartUpload``, which lists at most 640 parts
_DROPPED_BYTES: Final = 64 * 1024 * 1024  # of a body that is not read
_XML: Final = "application/xml"
_AUTHORITY: Final = r"^([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?$"
_DIGITS: Final = re.compile(r"[0-9]{1,15}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_CHECKSUMS: Final[Mapping[str, ChecksumKind]] = {
    "content-md5": ChecksumKind.MD5,
    **{f"x-amz-checksum-{kind}": kind for kind in ChecksumKind if kind is not ChecksumKind.GIT_BLOB},
}

_Archives = Annotated[Archives, provided(Archives)]
_ForwardedHost = Annotated[
    str | None,
    Header(
        alias=FORWARDED_HOST_HEADER,
        pattern=_AUTHORITY,
        description="Host and port that the client used, of a request that was forwarded over plain HTTP",
    ),
]

uploads_router = new_router("uploads")


@uploads_router.get(
    "/v1/blobs/credentials/train",
    summary="Begin the upload of one object, by S3's protocol",
    operation_id="get_upload_credentials",
)
async def credentials(
    *,
    archives: _Archives,
    caller: TeamController,
    request: Request,
    response: Response,
    forwarded_host: _ForwardedHost = None,
) -> UploadCredentials:
    response.headers["Cache-Control"] = "no-store"
    upload = await archives.begin(caller.organisation, caller.team)
    origin = f"http://{forwarded_host}" if forwarded_host else f"{request.url.scheme}://{request.url.netloc}"
    keys = UploadKeys(aws_session_token=upload.token, endpoint_url=f"{origin}{UPLOADS.rstrip('/')}")
    return UploadCredentials(s3_bucket=_BUCKET, s3_key=upload.key, creds=keys)


class _StalledError(InvalidRequestError):
    """The client may retry: its connection is slow or gone."""


_ANSWERS: Final[Mapping[type[BdnError], tuple[int, str]]] = {
    GrantExpiredError: (403, "ExpiredToken"),
    GrantInvalidError: (403, "AccessDenied"),
    NotFoundError: (404, "NoSuchUpload"),
    LimitExceededError: (400, "EntityTooLarge"),
    ChecksumMismatchError: (400, "BadDigest"),
    _StalledError: (400, "RequestTimeout"),
    InvalidRequestError: (400, "InvalidRequest"),
    StoreUnavailableError: (503, "ServiceUnavailable"),
}


@dataclass(slots=True)
class _PacedBody:
    """The body of a request, received as long as its sender is not slower than ``_SLOWEST``."""

    receive: Receive
    is_whole: bool

    async def pieces(self, most: int) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises ``_StalledError`` if the sender is too slow or gone."""
        window = StallWindow(_SLOWEST, most, time.monotonic())
        while not self.is_whole:
            try:
                async with asyncio.timeout(_SLOWEST.window_seconds):
                    message = await self.receive()
            except TimeoutError:
                raise _StalledError("the body has stalled") from None
            if message["type"] != "http.request":
                raise _StalledError("the client is gone")
            piece = message.get("body", b"")
            self.is_whole = not message.get("more_body", False)
            if problem := window.judge(len(piece), time.monotonic()):
                raise _StalledError(f"the body has {problem}")
            yield piece


@dataclass(frozen=True)
class UploadEndpoint:
    """An ASGI application: ``PUT`` of an object or a part, and the calls that begin, complete and abort an upload.

    The session token is verified, and the upload looked up, before a body is read. Bodies are received into
    ``buffers``, which organisations and the data plane share, and stored in ``threads``.
    """

    archives: Archives
    verifier: GrantVerifier
    chunks: ReceivedChunks
    threads: Executor
    on_received: Callable[[int], None]
    buffers: ReceiveBuffers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = HTTPConnection(scope)
        body = _PacedBody(receive, is_whole=not has_body(head.headers))
        try:
            answer = await self._answered(head, body)
        except BdnError as error:
            status, code = _refusal(error)
            refusal = Response(s3_uploads.error(code, str(error)), status, CLOSE, _XML)
            await answer_early(refusal, 0 if body.is_whole else _DROPPED_BYTES, scope, receive, send)
        else:
            await answer(scope, receive, send)

    async def _answered(self, head: HTTPConnection, body: _PacedBody) -> Response:
        token = head.headers.get("x-amz-security-token", "")
        grant = self.verifier.verify_as(UploadGrant, token, now=time.time())
        if know := head.scope.get("state", {}).get(KNOW):
            know(grant.organisation)
        if head.url.path != f"{UPLOADS}{_BUCKET}/{grant.key}":
            raise GrantInvalidError("it is for another object")
        await self.archives.check(grant.key)
        upload_id = head.query_params.get("uploadId")
        if upload_id not in (None, grant.key):
            raise NotFoundError("the upload of this id")
        number = head.query_params.get("partNumber")
        match head.scope["method"], upload_id is not None:
            case "PUT", True:
                s3_uploads.part_number(number)
                return _tagged(await self._put(head, body, grant))
            case "PUT", False if number is None:
                digest = await self._put(head, body, grant)
                return _tagged(await self.archives.complete(grant.key, [] if digest == EMPTY else [digest]))
            case "POST", True:
                parts = s3_uploads.part_digests(await _document(body))
                tag = f'"{await self.archives.complete(grant.key, parts)}"'
                return _answer("CompleteMultipartUploadResult", Bucket=_BUCKET, Key=grant.key, ETag=tag)
            case "POST", False if "uploads" in head.query_params:
                begun = {"Bucket": _BUCKET, "Key": grant.key, "UploadId": grant.key}
                return _answer("InitiateMultipartUploadResult", **begun)
            case "DELETE", True:
                await self.archives.abort(grant.key)
                return Response(status_code=204)
            case _:
                raise InvalidRequestError("this endpoint accepts PUT of an object, uploads in parts, and nothing else")

    async def _put(self, head: HTTPConnection, body: _PacedBody, grant: UploadGrant) -> Digest:
        """Store the body as a chunk of the upload. Returns its digest; nothing is stored of an empty one.

        Raises:
            InvalidRequestError: it has more than 8 MiB, or is malformed.
            ChecksumMismatchError: it is not what a checksum says.
            QuotaExceededError, LimitExceededError: the organisation, or this upload, has no room for it.
        """
        size = _announced(head.headers)
        if untime := head.scope.get("state", {}).get(UNTIMED):
            untime()  # the wait for a buffer is not the client's, and ``_PacedBody`` judges its pace
        turn = self.buffers.request(grant.organisation)
        is_at_work = False
        try:
            # Not canceled with this task: the future of a turn belongs to the buffers.
            await asyncio.shield(asyncio.wrap_future(turn.granted))
            content, checksums = await _received(head.headers, body, self.buffers.buffer_of(turn), size)
            self.on_received(len(content))
            work = self.threads.submit(self._store, grant.key, content, checksums)
            is_at_work = True
            work.add_done_callback(lambda _: self.buffers.release(turn))  # not earlier: the thread reads the buffer
        finally:
            if not is_at_work:
                self.buffers.release(turn)
        return await asyncio.wrap_future(work)

    def _store(self, key: str, content: memoryview, checksums: Sequence[Checksum]) -> Digest:
        for expected in checksums:
            running = RunningChecksum(expected, len(content))
            running.update(content)
            running.check("the body")
        digest = digest_of(content)
        if content:
            self.chunks.take(PushedChunk(key, digest, len(content)), content)
        return digest


async def _document(body: _PacedBody) -> bytes:
    document = bytearray()
    async for piece in body.pieces(_LIST_BYTES):
        document += piece
        if len(document) > _LIST_BYTES:
            raise InvalidRequestError(f"the list of parts has more than {_LIST_BYTES} bytes")
    return bytes(document)


async def _received(
    headers: Headers, body: _PacedBody, buffer: memoryview, size: int
) -> tuple[memoryview, list[Checksum]]:
    """The decoded body in the buffer, and the checksums that the client says it has."""
    decoder, done = AwsChunked() if _is_chunked(headers) else None, 0
    async for piece in body.pieces(size):
        for part in decoder.feed(piece) if decoder else (piece,):
            stop = done + len(part)
            if stop > size:
                raise InvalidRequestError(f"the body has more than {size} bytes")
            buffer[done:stop] = part
            done = stop
    trailers = decoder.trailers if decoder else {}
    if decoder and not decoder.is_over:
        raise InvalidRequestError("the body ends before the last chunk of aws-chunked")
    if decoder and headers.get("x-amz-decoded-content-length", str(done)) != str(done):
        raise InvalidRequestError(f"the body has {done} bytes, and not as many as it was announced with")
    announced = {name.strip() for name in headers.get("x-amz-trailer", "").lower().split(",") if name}
    if missing := announced - trailers.keys():
        raise InvalidRequestError(f"the body has no trailer {min(missing)!a}")
    return buffer[:done], _checksums({**headers, **trailers})


def _is_chunked(headers: Headers) -> bool:
    is_named = "aws-chunked" in headers.get("content-encoding", "")
    return is_named or headers.get("x-amz-content-sha256", "").startswith("STREAMING-")


def _announced(headers: Headers) -> int:
    """The size of the decoded body, or the largest possible one. Raises ``InvalidRequestError``."""
    announced = headers.get("x-amz-decoded-content-length" if _is_chunked(headers) else "content-length")
    if announced is None:
        return CHUNK_SIZE
    if not _DIGITS.fullmatch(announced) or int(announced) > CHUNK_SIZE:
        raise InvalidRequestError(f"a PUT of {announced[:40]} bytes: larger objects are sent in parts, and {PART_RULE}")
    return int(announced)


def _checksums(headers: Mapping[str, str]) -> list[Checksum]:
    """The checksums that the client sent. Raises ``InvalidRequestError`` for one that is not in base64."""
    found: list[Checksum] = []
    for name, kind in _CHECKSUMS.items():
        if (value := headers.get(name)) is not None:
            try:
                found.append(Checksum(kind, base64.b64decode(value, validate=True).hex()))
            except (binascii.Error, ValueError):
                raise InvalidRequestError(f"{name} is not in base64") from None
    signed = headers.get("x-amz-content-sha256", "")
    return [*found, Checksum(ChecksumKind.SHA256, signed)] if _SHA256.fullmatch(signed) else found


def _tagged(digest: Digest) -> Response:
    return Response(headers={"ETag": f'"{digest}"'})


def _answer(name: str, **fields: str) -> Response:
    return Response(s3_uploads.answer(name, **fields), media_type=_XML)


def _refusal(error: BdnError) -> tuple[int, str]:
    """Status and code as S3 has them; our own where S3 has none."""
    known = (_ANSWERS[kind] for kind in type(error).__mro__ if kind in _ANSWERS)
    return next(known, (status_of(error), error.code))
