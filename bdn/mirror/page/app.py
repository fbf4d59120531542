"""The page as an application: routes, errors as pages, and the headers of each answer."""

import logging
from typing import Final
from urllib.parse import urlencode

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bdn.core.errors import BdnError, InternalError, InvalidRequestError, NotFoundError, UnauthenticatedError
from bdn.mirror.access.callers import NotPermittedError
from bdn.mirror.page.actions import actions_router
from bdn.mirror.page.live import Feeds
from bdn.mirror.page.problems import REMEDY
from bdn.mirror.page.rendering import PATHS, Assets, Templates
from bdn.mirror.page.routes import PageParts, access_router, views_router
from bdn.mirror.page.sources import Sources
from bdn.wire.shapes import status_of

logger = logging.getLogger(__name__)
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_HEADINGS: Final = {403: "Not allowed", 404: "Not found", 422: "Not understood", 503: "Not available now"}
_REMEDIES: Final = {
    403: "Log out, and log in with a token that may do this.",
    404: "It does not exist, or is another organisation's or another team's. Look for it with the search box.",
    405: "Go back, and use the page's own links and forms.",
    500: "This is a bug: report it with the lines of the mirror's log around it.",
    503: "Reload the page in a moment.",
}
_UNCACHED: Final = "no-store"
ROUTERS: Final = (access_router, views_router, actions_router)


def new_page(sources: Sources) -> ASGIApp:
    """The application below ``/ui``. It has no OpenAPI document: its answers are pages, and no program's interface."""
    assets = Assets()
    templates = Templates(assets)
    app = FastAPI(
        title="BDN",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
    )
    app.state.page = PageParts(sources, templates, Feeds(sources, templates), assets)
    for router in ROUTERS:
        app.router.routes.extend(router.routes)

    @app.exception_handler(BdnError)
    async def on_error(request: Request, error: BdnError) -> Response:
        if isinstance(error, UnauthenticatedError) and not isinstance(error, NotPermittedError):
            return _to_login(request, error)
        return _error(templates, error, 403 if isinstance(error, NotPermittedError) else status_of(error))

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        fields = ", ".join(str(problem["loc"][-1])[:100] for problem in error.errors()[:10])
        return _error(templates, InvalidRequestError(f"not understood: {fields}. Go back, and correct it"), 422)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return _error(templates, NotFoundError(f"page {request.url.path[:200]}"), 404)
        problem = InvalidRequestError(f"{request.method} {request.url.path[:200]}: {error.detail}")
        return _error(templates, problem, error.status_code)

    @app.exception_handler(Exception)
    async def on_bug(_: Request, error: Exception) -> Response:
        return _error(templates, InternalError(type(error).__name__), 500)  # the server logs the traceback

    return _Headers(app)


def _error(templates: Templates, error: BdnError, status: int) -> Response:
    context = {"status": status, "heading": _HEADINGS.get(status, "This did not work"), "error": error}
    return HTMLResponse(templates.page("error.html", {**context, "remedy": _REMEDIES.get(status, REMEDY)}), status)


def _to_login(request: Request, error: UnauthenticatedError) -> Response:
    """Lead a browser to the log-in and back; a stream that reconnects only learns that it may not."""
    if request.method != "GET" or request.url.path.startswith(f"{PATHS['now']}/live/"):
        return Response(error.message, 401, media_type="text/plain")
    asked = str(request.url.path) + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"{PATHS['login']}?{urlencode({'next': asked})}", 303)


class _Headers:
    """Adds the headers that keep a browser to this page."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("Cache-Control", _UNCACHED)
            await send(message)

        await self._app(scope, receive, send_guarded)
