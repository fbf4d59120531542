"""Common parts of both HTTP services: routes, bearers, the error document, event streams, and uvicorn.

Building a route costs a millisecond, so routers are built at import. Objects of the running program reach routes by
``provided``.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import re
import socket
import struct
import sys
import termios
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, cast

import h11
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.sse import format_sse_event
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

import bdn
from bdn.core.errors import (
    BdnError,
    ForeignRequestError,
    InternalError,
    InUseError,
    InvalidRequestError,
    NotFoundError,
    single_error,
)
from bdn.core.pace.retry import StallPolicy
from bdn.net.admission import Admission, network_of
from bdn.net.descriptors import connection_limit
from bdn.net.request_bodies import DROP, KNOW, UNTIMED, Authenticate, RequestBodies, error_answer
from bdn.net.tls import HANDSHAKE, Certificate, refusal_of_plain_http
from bdn.wire.http_fields import LONGEST_WAIT_SECONDS, bearer_of, check_local
from bdn.wire.shapes import ErrorDocument

_Kind = TypeVar("_Kind")
_IN_PART: Final = (h11.IDLE, h11.SEND_BODY)
WaitSeconds = Annotated[
    float, Query(ge=0, le=LONGEST_WAIT_SECONDS, description="Seconds to wait for a terminal state before answering")
]
_PROBLEMS_NAMED: Final = 20
_LONGEST_PART: Final = 100  # characters of a field's name, which the caller may have chosen
_BACKLOG: Final = 1024  # connections that the kernel accepts in advance
_ACCEPTED_AT_ONCE: Final = 32  # a few turns of the loop pass before connections above the limit are closed
_RECEIVED_AT_ONCE: Final = 64 * 1024  # bytes that an unknown client can make a connection hold
_PIECES_AT_ONCE: Final = 8 * 1024  # bytes of a chunked body: 20 ms if each chunk has one byte
_GRACE_SECONDS = 5  # for responses in progress when the service stops
_AGAIN_SECONDS: Final = 60.0  # between two warnings of one shortage
SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
logger = logging.getLogger(__name__)


class _Bearer(HTTPBearer):
    """Describes tokens in the OpenAPI document; reads them like the data plane."""

    async def __call__(self, request: HTTPConnection) -> HTTPAuthorizationCredentials | None:
        token = bearer_of(request.headers.get("authorization"))
        return None if token is None else HTTPAuthorizationCredentials(scheme="Bearer", credentials=token)


_bearer = _Bearer(
    scheme_name="HTTPBearer", description="`Api-Key TOKEN` is the same as `Bearer TOKEN`", auto_error=False
)


async def _bearer_of(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> str | None:
    return credentials.credentials if credentials else None


Bearer = Annotated[str | None, Depends(_bearer_of)]


def provided(kind: type[_Kind]) -> _Kind:
    """A route's dependency: the object of this class that was passed to ``new_service``."""

    async def find(request: Request) -> _Kind:
        found: _Kind = request.app.state.provided[kind]
        return found

    return cast("_Kind", Depends(find))


_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {"default": {"model": ErrorDocument, "description": "Any failure"}}


class _Service(FastAPI):
    """Documents failures as JSON also where a success is a stream or a chunk's bytes."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            for path in super().openapi()["paths"].values():
                for operation in path.values():
                    (schema,) = operation["responses"]["default"]["content"].values()
                    operation["responses"]["default"]["content"] = {"application/json": schema}
        return super().openapi()

    @cached_property
    def document(self) -> bytes:
        """Cached JSON: callers without a token may request it, and it takes 10 ms."""
        return bytes(JSONResponse(self.openapi()).body)


def _operation_id(route: APIRoute) -> str:
    """From method and path, such as ``get_mirror_by_id_events``: the function name in generated clients."""
    path = re.sub(r"{(?:\w*_)?(\w+)}", r"by_\1", route.path_format)
    return "_".join([min(route.methods or ()).lower(), *re.findall(r"\w+", path)])


async def _docs(request: Request) -> HTMLResponse:
    """Swagger UI with local assets only: a cluster may lack internet access. Addresses are relative, for proxies."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title=request.app.title,
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon-32x32.png",
    )


async def _document(request: Request) -> Response:
    return Response(request.app.document, media_type="application/json")


_DOCS: Final = (
    Route("/openapi.json", _document),
    Route("/docs", _docs),
    Mount("/docs", StaticFiles(packages=[("fastapi_swagger", "resources")])),
)


def new_router(tag: str) -> APIRouter:
    return APIRouter(tags=[tag], responses=_RESPONSES, generate_unique_id_function=_operation_id)


def new_service(
    title: str,
    *,
    limit_request_bytes: int,
    authenticate: Authenticate,
    routers: Iterable[APIRouter] = (),
    provides: Iterable[object] = (),
    others: Mapping[str, ASGIApp] | None = None,
) -> FastAPI:
    """An application that answers every failure with the error document of docs/contract.md.

    ``provides`` are the objects for ``provided`` dependencies of ``routers``. ``authenticate`` is passed to
    ``RequestBodies``. ``others`` are applications by the prefix of their paths: they authenticate callers and bound
    bodies themselves.
    """
    app = _Service(
        title=title,
        version=bdn.__version__,
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
        responses=_RESPONSES,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=_operation_id,
    )
    app.router.routes.extend(_DOCS)
    app.state.provided = {type(each): each for each in provides}
    for router in routers:
        app.router.routes.extend(router.routes)  # ``include_router`` would rebuild them
    app.add_middleware(RequestBodies, limit=limit_request_bytes, authenticate=authenticate)
    app.add_middleware(_Others, others=others or {})

    @app.exception_handler(BdnError)
    async def on_error(_: Request, error: BdnError) -> JSONResponse:
        return error_answer(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return error_answer(InvalidRequestError(describe_validation(error.errors())))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            return error_answer(NotFoundError(f"path {request.url.path[:200]}"))
        headers, said = error.headers, error.detail
        if error.status_code == 405:
            # Starlette names only the methods of the path's first route, and none for a file.
            routes = [
                route for route in app.routes if isinstance(route, Route) and route.path_regex.match(request.url.path)
            ]
            methods = {method for route in routes for method in route.methods or ()} or {"GET", "HEAD"}
            headers = {"Allow": ", ".join(sorted(methods))}
            said = f"{said}; this path accepts {headers['Allow']}"
        problem = InvalidRequestError(f"{request.method} {request.url.path[:200]}: {said}")
        return error_answer(problem, error.status_code, headers)

    @app.exception_handler(Exception)
    async def on_bug(_: Request, error: Exception) -> JSONResponse:
        return error_answer(InternalError(type(error).__name__))  # the server logs the traceback

    return app


class _Others:
    def __init__(self, app: ASGIApp, others: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        found = next((other for prefix, other in self._others.items() if path.startswith(prefix)), self._app)
        await found(scope, receive, send)


class _LocalRequests:
    """Refuses a browser's requests from foreign pages, for services without tokens."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            check_local(*(", ".join(headers.getlist(name)) if name in headers else None for name in ("host", "origin")))
        except ForeignRequestError as error:
            await error_answer(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def describe_validation(problems: Any) -> str:  # noqa: ANN401 - pydantic's own list of dictionaries
    """One line with each field and its problem, without the value: it may be a secret."""
    lines: list[str] = []
    for problem in problems[:_PROBLEMS_NAMED]:
        parts = [str(part)[:_LONGEST_PART] for part in problem["loc"] if part != "body"]
        place = "the body" if not parts or problem["type"] == "json_invalid" else ".".join(parts)
        wrong = "is not a known field" if problem["type"] == "extra_forbidden" else problem["msg"]
        lines.append(f"{place}: {wrong}")
    left = len(problems) - len(lines)
    return "; ".join([*lines, *([f"and {left} more"] if left else [])])


_Document = TypeVar("_Document", bound=BaseModel)
_MEDIA_TYPE: Final = "text/event-stream"

EVENTS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "`progress` at least every second, then `done`; the data is the document as JSON",
        "content": {
            _MEDIA_TYPE: {
                "itemSchema": {
                    "type": "object",
                    "required": ["event", "data"],
                    "properties": {"event": {"enum": ["progress", "done"]}, "data": {"type": "string"}},
                }
            }
        },
    }
}


class EventStream(StreamingResponse):
    """Sends server-sent events.

    A client that does not read holds up ``events``, which are closed when it leaves. A route of this class declares
    its status 200, which FastAPI would read from a constructor with a ``status_code``.

    FastAPI's own stream is unusable: when a listener leaves while its socket is full, FastAPI closes a queue under the
    task that still writes to it, and uvicorn logs the traceback of a failure that is not ours.
    """

    media_type = _MEDIA_TYPE

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self._events = events
        # A proxy such as nginx must neither cache nor buffer the events.
        super().__init__(self._events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client leaves.

        The pending await is then canceled once, and may clean up. Starlette's own code cancels again at each await: a
        database query could not return its connection.
        """
        with single_error():
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self.stream_response(send))
                leaving = group.create_task(self.listen_for_disconnect(receive))
                sending.add_done_callback(lambda _: leaving.cancel())
                leaving.add_done_callback(lambda _: sending.cancel())

    async def stream_response(self, send: Send) -> None:
        """Send all events. Closes the generator also when canceled."""
        async with aclosing(self._events):
            await super().stream_response(send)


async def document_events(
    documents: AsyncGenerator[_Document], is_last: Callable[[_Document], bool]
) -> AsyncGenerator[bytes]:
    """The documents as events: ``done`` for the document that ``is_last``, ``progress`` for all before."""
    async with aclosing(documents):
        async for document in documents:
            event = "done" if is_last(document) else "progress"
            yield format_sse_event(event=event, data_str=document.model_dump_json())


OWNER: Final = "is_owner"  # request state: the result of ``is_owner`` for the connection
CALLER: Final = "caller"  # request state: the user id of a unix socket's client; None for other connections
_PEER: Final = "3i"  # pid, uid and gid: ``struct ucred`` of unix(7)


def caller_of(connection: socket.socket) -> int | None:
    """The user id of the client process, as seen in this user namespace; None without a unix socket."""
    if connection.family != socket.AF_UNIX:
        return None
    _, uid, _ = _peer(connection)
    return uid


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_PEER))
    pid, uid, gid = struct.unpack(_PEER, found)
    return pid, uid, gid


def is_owner(connection: socket.socket) -> bool:
    """Whether the client of a unix socket has this user id, and paths mean the same files to it.

    Another mount namespace has other files at the same paths. Call it when the client connects: later the process may
    be gone, and its id reused.
    """
    if connection.family != socket.AF_UNIX:
        return False
    pid, uid, _ = _peer(connection)
    try:
        return uid == os.geteuid() and Path(f"/proc/{pid}/ns/mnt").readlink() == Path("/proc/self/ns/mnt").readlink()
    except OSError:  # the process is gone, or not visible from here
        return False


def queued_bytes(descriptor: int) -> int:
    """Bytes in a socket that the client's kernel has not acknowledged.

    Used to judge readers. Counting the bytes that the socket accepts would be unfair: it accepts none before a third of
    its buffer is free, which is a megabyte and takes an honest reader with 50 KB/s 20 s.
    """
    (queued,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
    return int(queued)


_HEAD_END: Final = re.compile(rb"\n\r?\n")  # like h11's search


class _Reading(FlowControl):
    def __init__(self, transport: asyncio.Transport, on_resume: Callable[[], None]) -> None:
        super().__init__(transport)
        self._on_resume = on_resume

    def resume_reading(self) -> None:
        """Called before each part of a body, and after each response."""
        super().resume_reading()
        self._on_resume()


class TimedProtocol(H11Protocol):
    """Closes a connection when a request exceeds ``request_seconds``, from its first byte or from connecting.

    Also closes a connection whose client reads a response more slowly than ``slowest``, because its files stay open,
    and one that ``admission`` refuses. uvicorn's own timeouts begin after a response. Each request's state has
    ``OWNER``, ``CALLER``, ``DROP`` and ``UNTIMED``, and ``KNOW`` until the connection's caller is known.

    A head is parsed on arrival, and bytes after it when the application requests them: h11 takes 2 s for a megabyte of
    chunks of one byte.
    """

    request_seconds = 30.0  # for head and body, which is some megabytes at most
    slowest = StallPolicy(window_seconds=30.0)  # as on the data plane
    below: asyncio.Transport | None = None  # the transport below TLS, if any
    admission: "Admission[TimedProtocol] | None" = None
    _dropped: asyncio.Future[None] | None = None  # set while incoming bytes are dropped
    _droppable = 0  # bytes left to drop
    _is_wanted = False  # the application requested the body
    _body_left = 0  # bytes not parsed yet
    _before = b""  # the last bytes of a partially parsed head
    _is_known = False  # a request of this connection was authenticated
    _deadline: asyncio.TimerHandle | None = None
    _is_untimed = False  # the application judges the pace of this body
    _next_look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        self.flow = _Reading(transport, self._want)
        self._unread = bytearray()
        transport.max_size = _RECEIVED_AT_ONCE  # type: ignore[attr-defined] # asyncio's own: 256 KiB
        self.app_state = {
            **self.app_state,
            OWNER: is_owner(connection),
            CALLER: caller_of(connection),
            DROP: self._drop,
            UNTIMED: self._untime,
        }
        if self.admission is not None:
            self.app_state[KNOW] = self._know
        if self.below is None:
            self.admit(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Part of a request, all of it, or several."""
        if not self.flow.write_paused:
            self._look_no_more()  # the next response would count as unread bytes of the last one
        if self._dropped is not None:
            self._droppable -= len(data)
            self._end_drop(is_over=self._droppable <= 0)
            return
        self._unread += data
        self._parse()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave()
        self._end_drop()
        self._forget()
        self._look_no_more()
        super().connection_lost(exc)

    def admit(self, carrier: asyncio.Transport) -> None:
        """Hold a place for a client, or close it. ``carrier`` is the socket's own transport."""
        user, peer = caller_of(carrier.get_extra_info("socket")), carrier.get_extra_info("peername")
        address = network_of(peer[0]) if user is None else f"user {user}"
        if self.admission is not None and not self.admission.admit(self, address):
            carrier.abort()

    def leave(self) -> None:
        if self.admission is not None:
            self.admission.leave(self)

    @property
    def is_idle(self) -> bool:
        """Whether it may be closed in favour of other clients: no known caller's request or response is in progress."""
        if not self._is_known:
            return True
        return self.conn.our_state is h11.IDLE and not self.transport.is_closing() and not self._untaken()

    def end(self) -> None:
        self.leave()
        (self.below or self.transport).abort()

    def _parse(self) -> None:
        """Parse as much as the application requested. The remainder stays buffered, and reading pauses."""
        if self.transport.is_closing():
            return
        if count := self._parsable():
            is_head = self.conn.their_state is h11.IDLE
            piece = bytes(self._unread[:count])
            del self._unread[:count]
            super().data_received(piece)
            if not is_head:
                self._body_left -= count
            elif self.conn.their_state is h11.IDLE:
                self._before = (self._before + piece)[-2:]
            elif self.conn.their_state is h11.SEND_BODY:
                self._is_wanted, self._before, self._body_left = False, b"", self._announced()
            else:
                self._before = b""
            if self._parsable():
                self.loop.call_soon(self._parse)
            self._watch()
        if self._unread:
            self.flow.pause_reading()
        elif self.conn.their_state is h11.IDLE:
            # The application requests no head, so the reading of a head's rest resumes here.
            FlowControl.resume_reading(self.flow)

    def _parsable(self) -> int:
        """Bytes to parse now. Of a chunked body only a few: each chunk costs as much as a head."""
        if not self._unread:
            return 0
        if self.conn.their_state is h11.IDLE:
            end = _HEAD_END.search(self._before + self._unread)
            return len(self._unread) if end is None else max(1, end.end() - len(self._before))
        if not (self.conn.their_state is h11.SEND_BODY and self._is_wanted):
            return 0
        most = _PIECES_AT_ONCE if self._body_left > sys.maxsize // 2 else self._body_left
        return min(len(self._unread), most)

    def _announced(self) -> int:
        """The body size of this request; ``sys.maxsize`` without Content-Length."""
        lengths = [value for name, value in self.headers if name == b"content-length"]
        return int(lengths[0]) if lengths else sys.maxsize

    def _want(self) -> None:
        self._is_wanted = True
        self._parse()

    async def _drop(self, most: int) -> None:
        """Drop the remainder of a body unparsed, at most ``most`` bytes, within the request's time."""
        self._is_untimed = False
        self._watch()
        self._droppable = min(most, self._body_left) - len(self._unread)
        self._unread.clear()
        if self._droppable > 0 and not self.transport.is_closing():
            self._dropped = self.loop.create_future()
            self.flow.resume_reading()
            await self._dropped

    def _end_drop(self, *, is_over: bool = True) -> None:
        if is_over and self._dropped is not None and not self._dropped.done():
            self._dropped.set_result(None)

    def _know(self, organisation: str) -> None:
        """Raises ``StoreUnavailableError``: the organisation is at its limit of connections."""
        self._is_known = True
        del self.app_state[KNOW]
        if self.admission is not None:
            self.admission.know(self, organisation)

    def pause_writing(self) -> None:
        """The client is slow: its buffers and ours are full."""
        super().pause_writing()
        self._look_at_reader()

    def resume_writing(self) -> None:
        self._look_no_more()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """The response is written, but may still be unread."""
        super().on_response_complete()
        self._parse()  # a request that arrived meanwhile
        if self.transport.is_closing():
            self._look_at_reader()

    def timeout_keep_alive_handler(self) -> None:
        """Keep an idle connection open while the client still reads its last response."""
        if self.transport.is_closing() or not self._untaken():
            super().timeout_keep_alive_handler()
            return
        self._look_at_reader()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _look_at_reader(self) -> None:
        """Check once per window until the client has read everything. The application writes nothing meanwhile."""
        if self._next_look is None:
            self._look(None)

    def _look(self, before: int | None) -> None:
        self._next_look = None
        if self.below is not None and self.transport.is_closing():
            return  # the end of TLS has its own timeout
        left = self._untaken()
        if before is not None and before - left < min(before, self.slowest.least_bytes):
            self.transport.abort()
        elif left:
            self._next_look = self.loop.call_later(self.slowest.window_seconds, self._look, left)

    def _untaken(self) -> int:
        """Response bytes that the client's kernel has not acknowledged, in all buffers."""
        below = self.below.get_write_buffer_size() if self.below is not None else 0
        queued = queued_bytes(self.transport.get_extra_info("socket").fileno())
        return queued + below + self.transport.get_write_buffer_size()

    def _look_no_more(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def _watch(self) -> None:
        if self.conn.their_state not in _IN_PART:
            self._is_untimed = False
            self._forget()
        elif self._deadline is None and not self._is_untimed:
            self._deadline = self.loop.call_later(self.request_seconds, self.transport.close)

    def _untime(self) -> None:
        self._is_untimed = True
        self._forget()

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _OverTls(SSLProtocol):
    """TLS in front of a ``TimedProtocol``, with the current certificate. A plain HTTP client gets a hint to use TLS.

    asyncio's own protocol, created where uvicorn creates its own: uvicorn would pass asyncio one fixed context, and no
    handshake timeout.
    """

    max_size = 32 * 1024  # buffer per connection; asyncio's default is eight times this
    _plain: asyncio.Transport
    _received: memoryview
    _has_begun = False
    _is_refused = False

    def __init__(
        self,
        certificate: Certificate,
        served: TimedProtocol,
    ) -> None:
        self._served = served
        super().__init__(
            asyncio.get_running_loop(),
            self._served,
            certificate.context(),
            None,  # type: ignore[arg-type] # no waiter for the handshake
            server_side=True,
            ssl_handshake_timeout=TimedProtocol.request_seconds,  # type: ignore[arg-type] # accepts any number
            ssl_shutdown_timeout=TimedProtocol.request_seconds,  # a slow client may still read the response
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._plain = self._served.below = transport
        super().connection_made(transport)
        self._served.admit(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._served.leave()  # SSLProtocol does not report connections that end before the handshake
        super().connection_lost(exc)

    def get_buffer(self, n: int) -> memoryview:
        self._received = super().get_buffer(n)
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        """Handle TLS bytes, or refuse a plain HTTP request."""
        if not self._has_begun:
            self._has_begun, self._is_refused = True, self._received[0] != HANDSHAKE
            if self._is_refused:
                self._plain.write(refusal_of_plain_http())
                self._plain.write_eof()
        # After a refusal, keep reading until the client closes or the handshake times out: a reset would lose the
        # response.
        if not self._is_refused:
            super().buffer_updated(nbytes)


def _end_idle(connections: Iterable[TimedProtocol]) -> bool:
    idle = next((one for one in connections if one.is_idle), None)
    if idle is not None:
        idle.end()
    return idle is not None


class _Server(uvicorn.Server):
    """Leaves signal handling to the program, which may run several servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _released(app: ASGIApp) -> ASGIApp:
    """Suppresses the server's cancellation of responses at shutdown: a client may not have read its response."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # only the server cancels this task, which ends here
            await app(scope, receive, send)

    return run


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any free port. Raises ``InUseError`` or ``InvalidRequestError``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InUseError(f"port {port} of {host}", ("another process",)) from error
        raise InvalidRequestError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listener


@asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket.socket,
    *,
    is_local: bool = False,
    certificate: Certificate | None = None,
    connections: int | None = None,
) -> AsyncIterator[None]:
    """Serve ``app`` on ``listener`` until the block ends; closes the listener.

    ``is_local``: every client of the listener is trusted, so requests from foreign web pages are refused. With a
    ``certificate`` the server speaks only TLS. Above ``connections``, by default ``connection_limit``, a new client
    replaces another one, as in ``ChunkServer``.
    """
    limit = connection_limit() if connections is None else connections
    admission: Admission[TimedProtocol] = Admission(limit, _end_idle)

    def protocol(**given: Any) -> asyncio.BaseProtocol:  # noqa: ANN401 - uvicorn's own
        served = TimedProtocol(**given)
        served.admission = admission
        return served if certificate is None else _OverTls(certificate, served)

    config = uvicorn.Config(
        _released(_LocalRequests(app) if is_local else app),
        http=cast("type[TimedProtocol]", protocol),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        backlog=max(1, min(_ACCEPTED_AT_ONCE, limit // 8)),  # for asyncio: connections accepted per turn of the loop
    )
    server = _Server(config)
    log_shortages()
    with single_error(), contextlib.closing(listener):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(server.serve(sockets=[listener]))
            try:
                while not server.started and not task.done():
                    await asyncio.sleep(0.005)
                if server.started:
                    listener.listen(_BACKLOG)
                yield
            finally:
                server.should_exit = True
                await asyncio.wait([task])  # otherwise the group would cancel it when the block fails
                for connection in admission.clients():  # such as those in a handshake, unknown to uvicorn
                    connection.end()


def log_shortages() -> None:
    """Log a shortage of descriptors once a minute, instead of a traceback per listener."""
    told_at = -_AGAIN_SECONDS

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal told_at
        error = context.get("exception")
        if isinstance(error, ValueError) and "._start_serving(" in context["message"]:
            # A second after a shortage asyncio listens again, once per refused client; the socket is closed since.
            return
        if not ("socket" in context and isinstance(error, OSError) and error.errno in SHORTAGES):
            loop.default_exception_handler(context)
        elif (now := time.monotonic()) - told_at >= _AGAIN_SECONDS:
            told_at = now
            logger.warning(
                "new connections have to wait: %s; raise the limit of open files (ulimit -n)", error.strerror
            )

    asyncio.get_running_loop().set_exception_handler(handle)
