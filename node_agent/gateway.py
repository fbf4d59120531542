"""The hub gateway: the hub's own API on this node, for clients with ``HF_ENDPOINT``.

What a client asks goes to the mirror, which answers all but files. A file is filled into the node's cache and sent from
there. Nothing here knows a token: the header passes through.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from secrets import token_hex
from typing import Final, Self

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from bdn.core.cache.index import Holder
from bdn.core.chunk import Digest
from bdn.core.errors import (
    BdnError,
    DiskFailedError,
    InternalError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
)
from bdn.core.pace.rate_limit import TrafficClass
from bdn.disk.durable import disk_errors
from bdn.disk.threads import in_thread
from bdn.net.api_clients import MirrorClient
from bdn.net.api_server import bind_tcp, describe_validation, serving
from bdn.net.request_bodies import CLOSE, answer_early
from bdn.wire.http_fields import (
    UnsatisfiableRangeError,
    format_content_range,
    is_loopback,
    parse_range,
)
from bdn.wire.hub_schema import HubAnswer, HubContent, HubRequest
from node_agent.app import Agent
from node_agent.background_tasks import BackgroundTasks
from node_agent.fill.provision import FillRequest
from node_agent.metrics import AgentMetrics
from node_agent.stage.lifecycle import Lifecycle

logger = logging.getLogger(__name__)
_PIECE: Final = 4 * 1024**2
_MOST_BYTES: Final = 50_000_000_000  # that the hub's client downloads by HTTP (MAX_HTTP_DOWNLOAD_SIZE)
_LARGEST_BODY: Final = 1024**2
_ATTEMPTS: Final = 3  # while cached files change
_PATIENCE_SECONDS: Final = (
    8.0  # then the client gets its first bytes, of 10 that the hub's client waits for a byte (HF_HUB_DOWNLOAD_TIMEOUT)
)
_LONGEST_SECONDS: Final = 3600.0  # for clients that repeat nothing
_POLL_SECONDS: Final = 20.0
_DROP: Final = 16  # bytes: a beginning lasts for 4 hours
_DROP_SECONDS: Final = 4.0
_FIRST_TIME: Final = "BDN copies this file from the hub for the first time"
_PAUSE_SECONDS: Final = 5  # between two requests of a client, if the mirror does not know how long the copy takes
_LONGEST_PAUSE_SECONDS: Final = 20  # the copy may be faster than expected
Opening = asyncio.Future[FileIO | HubAnswer]  # the file, or why there is none


@dataclass(frozen=True)
class _FilePart:
    """The part of a file that a client requested, with status and headers of the answer."""

    start: int
    stop: int
    status: int
    headers: Mapping[str, str]

    @classmethod
    def of(cls, wanted: str | None, headers: Mapping[str, str]) -> Self:
        """``wanted`` is a Range header. Raises ``UnsatisfiableRangeError``."""
        size = int(headers["content-length"])
        part = parse_range(wanted, size)
        if part is None:
            return cls(0, size, 200, headers)
        length = {"content-length": str(part.stop - part.start), "content-range": format_content_range(part, size)}
        return cls(part.start, part.stop, 206, {**headers, **length})


@dataclass(frozen=True)
class Gateway:
    """``lifecycle`` fills files, and verifies those that another program changed.

    Files of more than ``most_bytes`` are downloaded from the gateway's ``other_port``.
    """

    client: MirrorClient
    lifecycle: Lifecycle
    background: BackgroundTasks
    metrics: AgentMetrics
    other_port: int
    most_bytes: int

    async def respond(self, request: Request) -> Response:
        try:
            response = await self._respond(request)
        except LimitExceededError as error:
            response = _Early(_refusal(413, str(error), CLOSE))
        except InvalidRequestError as error:
            response = _refusal(400, str(error))
        except BdnError as error:  # never 401, which clients take for "no such repository"
            logger.warning("cannot answer a client of the hub gateway: %s", error)
            response = _refusal(504 if error.transient else 503, str(error))
        self.metrics.gateway_answers.labels(response.status_code).inc()
        return response

    async def _respond(self, request: Request) -> Response:
        asked = await _asked(request)
        answer = await self.client.ask_hub(asked, 0)
        if self._is_too_large(asked, answer) and request.scope["server"][1] != self.other_port:
            return self._elsewhere(answer, request)
        if answer.content is None and not answer.is_pending:
            return _response(answer, request)
        return await self._file(asked, answer, request)

    def _is_too_large(self, asked: HubRequest, answer: HubAnswer) -> bool:
        is_file = asked.method == "HEAD" and answer.status == 200
        return is_file and int(answer.headers.get("content-length", 0)) > self.most_bytes

    def _elsewhere(self, answer: HubAnswer, request: Request) -> Response:
        """A redirect without the size: the hub's client refuses to download more by HTTP if it knows how much it is.

        The client sends no token to another port, so the repository must be public.
        """
        place = request.url.replace(port=self.other_port, path="", query="")
        location = f"{place}{_target(request)}"
        response = Response(None, 302, {**answer.headers, "location": location})
        del response.headers["content-length"]
        return response

    async def _file(self, asked: HubRequest, answer: HubAnswer, request: Request) -> Response:
        try:
            part = _FilePart.of(request.headers.get("range"), answer.headers)
        except UnsatisfiableRangeError:
            size = answer.headers["content-length"]
            said = "no byte of the file is in this range"
            return _refusal(416, said, {**answer.headers, "content-range": f"bytes */{size}"})
        if part.start == part.stop:
            return Response(b"", part.status, part.headers)
        opening: Opening = asyncio.get_running_loop().create_future()
        self.background.start(self._open_for(opening, asked, answer), "hub gateway: fill")
        try:
            await self._wait(opening, request, _PATIENCE_SECONDS)
            if not opening.done():
                return await self._late(opening, asked, request, part)
            return self._opened_answer(opening.result(), request, part)
        except BaseException:
            opening.cancel()
            raise

    async def _late(self, opening: Opening, asked: HubRequest, request: Request, part: _FilePart) -> Response:
        """For a client that would give up without a byte."""
        begun = await self.client.ask_hub(asked.model_copy(update={"beginning_at": part.start}), 0)
        if beginning := begun.beginning[: part.stop - part.start - 1]:  # the last byte comes from the verified file
            headers = {**part.headers, "x-hf-warning": f"bdn; {_FIRST_TIME}"}
            return StreamingResponse(self._slowly(opening, beginning, part), part.status, headers)
        if not _repeats(request):
            await self._wait(opening, request, _LONGEST_SECONDS)
        if opening.done():
            return self._opened_answer(opening.result(), request, part)
        opening.cancel()
        return _come_again(begun.eta_seconds)

    def _opened_answer(self, found: FileIO | HubAnswer, request: Request, part: _FilePart) -> Response:
        if isinstance(found, HubAnswer):
            return _response(found, request)
        return StreamingResponse(self._sent(found, part.start, part.stop), part.status, part.headers)

    async def _wait(self, opening: Opening, request: Request, seconds: float) -> None:
        """Until the file is open, the client is gone, or the time is over."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not opening.done() and (left := until - loop.time()) > 0 and not await request.is_disconnected():
            await asyncio.wait([opening], timeout=min(_POLL_SECONDS, left))

    async def _open_for(self, opening: Opening, asked: HubRequest, answer: HubAnswer) -> None:
        """Wait for the mirror's copy while the client does; fill to the end, also without the client: it comes again."""
        try:
            while answer.is_pending and not opening.done():
                answer = await self.client.ask_hub(asked, _POLL_SECONDS)
            if answer.is_pending:
                return
            found = answer if answer.content is None else await self._opened(answer.content)
        except Exception as error:
            if not isinstance(error, BdnError):
                logger.exception("a file of the hub gateway is not filled because of a bug")
            if not opening.done():
                opening.set_exception(error if isinstance(error, BdnError) else InternalError(repr(error)))
        else:
            if not opening.done():
                opening.set_result(found)
            elif isinstance(found, FileIO):
                found.close()

    async def _opened(self, content: HubContent) -> FileIO:
        """Fill the file, and open it: an open file stays readable when the cache evicts it."""
        manifest = Digest.parse(content.manifest)
        provision, cache = self.lifecycle.provision, self.lifecycle.cache
        holder = Holder(f"gateway-{token_hex(8)}", "gateway")
        held = await provision.catalogue.obtain(manifest, content.grant, is_complete=cache.index.is_complete(manifest))
        digest = next((file.digest for file in held.manifest.files if file.path == content.path), None)
        if digest is None:
            raise NotFoundError(f"{content.path} of manifest {manifest}")
        wanted = frozenset({digest})
        request = FillRequest([manifest], content.grant, holder, TrafficClass.STAGE, lambda *_: None, wanted)
        try:
            for _ in range(_ATTEMPTS):
                await provision.run(request)
                if not await in_thread(cache.files.whole.changed, wanted):
                    return await in_thread(_open, cache.files.whole.places.file(digest))
                await self.lifecycle.settle(wanted)
        finally:
            await cache.leave(holder.stage_id)
        raise DiskFailedError(str(cache.files.whole.places.file(digest)), "the file changes again and again")

    async def _slowly(self, opening: Opening, beginning: bytes, part: _FilePart) -> AsyncIterator[bytes]:
        """A few bytes at a time keep the client waiting; the rest comes when the file is verified and open.

        Ends early, so that the client's connection is closed, if the file is not copied, or begins with other bytes.
        """
        sent = 0
        try:
            while not opening.done() and sent < len(beginning):
                yield beginning[sent : sent + _DROP]
                sent = min(sent + _DROP, len(beginning))
                await asyncio.wait([opening], timeout=_DROP_SECONDS)
            await asyncio.wait([opening], timeout=_POLL_SECONDS)
        finally:
            opening.cancel()
        try:
            found = None if opening.cancelled() else opening.result()
        except BdnError as error:
            logger.warning("closing the connection of a client of the hub gateway: %s", error)
            return
        if not isinstance(found, FileIO):
            reason = "the copy takes too long" if found is None else found.headers.get("x-error-message", found.status)
            logger.warning("closing the connection of a client of the hub gateway: %s", reason)
            return
        if await in_thread(os.pread, found.fileno(), sent, part.start) != beginning[:sent]:
            logger.warning("closing the connection of a client of the hub gateway: the copy had wrong bytes at first")
            found.close()
            return
        async for piece in self._sent(found, part.start + sent, part.stop):
            yield piece

    async def _sent(self, file: FileIO, start: int, stop: int) -> AsyncIterator[bytes]:
        with file:
            while start < stop and (
                piece := await in_thread(os.pread, file.fileno(), min(_PIECE, stop - start), start)
            ):
                start += len(piece)
                self.metrics.gateway_bytes.inc(len(piece))
                yield piece


class _Early(Response):
    """An answer before the end of the request's body."""

    def __init__(self, answer: Response) -> None:
        super().__init__(status_code=answer.status_code)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_early(self._answer, _LARGEST_BODY, scope, receive, send)


def _open(path: Path) -> FileIO:
    with disk_errors(path):
        return FileIO(path)


def _target(request: Request) -> str:
    """As the client wrote it: a revision such as ``refs%2Fpr%2F1`` is one segment."""
    path, query = request.scope["raw_path"].decode("latin-1"), request.scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


async def _asked(request: Request) -> HubRequest:
    """Raises ``InvalidRequestError``, ``LimitExceededError``: it is not a request of a hub client."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _LARGEST_BODY:
            raise LimitExceededError("bytes of the request", len(body), _LARGEST_BODY)
    given = {
        "method": request.method,
        "target": _target(request),
        "authorization": request.headers.get("authorization"),
        "content_type": request.headers.get("content-type", ""),
        "body": body.decode("utf-8", "replace"),
    }
    try:
        return HubRequest.model_validate(given)
    except ValidationError as error:
        raise InvalidRequestError(f"not a request of a hub client: {describe_validation(error.errors())}") from None


def _response(answer: HubAnswer, request: Request) -> Response:
    headers = dict(answer.headers)
    if (link := headers.get("link", "")).startswith("</"):
        headers["link"] = f"<{str(request.base_url).rstrip('/')}{link[1:]}"
    return Response(None if request.method == "HEAD" else answer.body, answer.status, headers)


def _repeats(request: Request) -> bool:
    """Whether the client repeats a request that is answered 429: the hub's client does when it downloads a file."""
    is_hubs_own = "hf_hub/" in request.headers.get("user-agent", "")
    return is_hubs_own and request.headers.get("range", "bytes=0-").endswith("-")


def _come_again(eta_seconds: float | None) -> Response:
    """The hub's client repeats such a request five times."""
    seconds = min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS if eta_seconds is None else int(eta_seconds))
    return _refusal(429, _FIRST_TIME, {"retry-after": str(seconds), "x-hf-warning": f"bdn; {_FIRST_TIME}"})


def _refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    said = message.encode("latin-1", "replace").decode("latin-1").replace("\n", " ")
    kept = {name: value for name, value in (headers or {}).items() if name != "content-length"}
    return Response(
        f"{message}\n", status, {**kept, "x-error-message": said, "content-type": "text/plain; charset=utf-8"}
    )


@asynccontextmanager
async def serving_gateway(agent: Agent, most_bytes: int = _MOST_BYTES) -> AsyncIterator[str]:
    """Serve the gateway at its port and another one, and yield its URL; "" if it has no address.

    Raises ``InUseError``, ``InvalidRequestError``: it cannot be opened.
    """
    if agent.settings.gateway is None:
        yield ""
        return
    if "node" not in agent.settings.roles:
        raise InvalidRequestError("BDN_AGENT_GATEWAY fills files for this machine, so the agent needs the role 'node'")
    host, port = agent.settings.gateway
    is_local = is_loopback(host)
    certificate = None if is_local else agent.certificate
    async with BackgroundTasks() as background, AsyncExitStack() as stack:
        listeners = [bind_tcp(host, port), bind_tcp(host, 0 if is_local else port + 1)]
        own, other = (listener.getsockname()[1] for listener in listeners)
        gateway = Gateway(agent.client, agent.stages.lifecycle, background, agent.metrics, other, most_bytes)
        app = Starlette(routes=[Route("/{path:path}", gateway.respond, methods=["GET", "HEAD", "POST"])])
        for listener in listeners:
            await stack.enter_async_context(serving(app, listener, is_local=is_local, certificate=certificate))
        url = f"{'http' if certificate is None else 'https'}://{f'[{host}]' if ':' in host else host}:{own}"
        logger.info("hub gateway started", extra={"url": url})
        yield url
