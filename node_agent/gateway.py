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
from typing import Final

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
from node_agent.background_tasks import BackgroundTasks, in_thread
from node_agent.fill.provision import FillRequest
from node_agent.metrics import AgentMetrics
from node_agent.stage.lifecycle import Lifecycle

logger = logging.getLogger(__name__)
_PIECE: Final = 4 * 1024**2
_MOST_BYTES: Final = 50_000_000_000  # that the hub's client downloads by HTTP (MAX_HTTP_DOWNLOAD_SIZE)
_LARGEST_BODY: Final = 1024**2
_ATTEMPTS: Final = 3  # while cached files change
_PATIENCE_SECONDS: Final = 8.0  # of 10 that the hub's client waits for a byte (HF_HUB_DOWNLOAD_TIMEOUT)
_LONGEST_SECONDS: Final = 3600.0  # for clients that repeat nothing
_POLL_SECONDS: Final = 20.0
_PAUSE_SECONDS: Final = 5  # between two requests of a client, if the mirror does not know how long the copy takes
_LONGEST_PAUSE_SECONDS: Final = 20  # the copy may be faster than expected


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
        until = asyncio.get_running_loop().time() + (_PATIENCE_SECONDS if _repeats(request) else _LONGEST_SECONDS)
        asked = await _asked(request)
        answer = await self._answer(asked, request, until)
        if answer.is_pending:
            return _come_again(answer.eta_seconds)
        if self._is_too_large(asked, answer) and request.scope["server"][1] != self.other_port:
            return self._elsewhere(answer, request)
        if answer.content is None:
            return _response(answer, request)
        return await self._file(answer, answer.content, request.headers.get("range"), until)

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

    async def _answer(self, asked: HubRequest, request: Request, until: float) -> HubAnswer:
        """Waits for the copy of a file, as long as its client does."""
        loop = asyncio.get_running_loop()
        while True:
            answer = await self.client.ask_hub(asked, min(_POLL_SECONDS, max(0.0, until - loop.time())))
            if not answer.is_pending or loop.time() >= until or await request.is_disconnected():
                return answer

    async def _file(self, answer: HubAnswer, content: HubContent, wanted: str | None, until: float) -> Response:
        size, headers = content.size, dict(answer.headers)
        try:
            part = parse_range(wanted, size)
        except UnsatisfiableRangeError:
            said = "no byte of the file is in this range"
            return _refusal(416, said, {**headers, "content-range": f"bytes */{size}"})
        start, stop, status = 0, size, 200
        if part is not None:
            start, stop, status = part.start, part.stop, 206
            headers["content-range"] = format_content_range(part, size)
        headers["content-length"] = str(stop - start)
        if not size:
            return Response(b"", status, headers)
        opening: asyncio.Future[FileIO] = asyncio.get_running_loop().create_future()
        self.background.start(self._open_for(opening, content), "hub gateway: fill")
        await asyncio.wait([opening], timeout=max(0.0, until - asyncio.get_running_loop().time()))
        if not opening.done():
            opening.cancel()
            return _come_again(None)
        return StreamingResponse(self._sent(opening.result(), start, stop), status, headers)

    async def _open_for(self, opening: asyncio.Future[FileIO], content: HubContent) -> None:
        """Fill to the end, also if the client does not wait: it comes again."""
        try:
            file = await self._opened(content)
        except Exception as error:
            if not isinstance(error, BdnError):
                logger.exception("a file of the hub gateway is not filled because of a bug")
            if not opening.done():
                opening.set_exception(error if isinstance(error, BdnError) else InternalError(repr(error)))
        else:
            if opening.done():
                file.close()
            else:
                opening.set_result(file)

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
    said = "BDN copies this file from the hub for the first time"
    return _refusal(429, said, {"retry-after": str(seconds), "x-hf-warning": f"bdn; {said}"})


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
