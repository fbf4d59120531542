"""The routes of the page: log-in and log-out, the views, their live streams, and the assets."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from bdn.core.errors import NotFoundError, UnauthenticatedError
from bdn.mirror.access.callers import Caller, NotPermittedError
from bdn.mirror.access.sessions import SESSION_SECONDS
from bdn.mirror.page.cluster import CLUSTER
from bdn.mirror.page.forms import check_same_origin, form_of
from bdn.mirror.page.jobs import JOB, JOBS
from bdn.mirror.page.live import Feeds
from bdn.mirror.page.mirrors import MIRROR, MIRRORS
from bdn.mirror.page.model import MODEL
from bdn.mirror.page.node import NODE
from bdn.mirror.page.now import NOW
from bdn.mirror.page.operations import EVICTION, PREFETCH
from bdn.mirror.page.rendering import PATHS, Assets, Templates
from bdn.mirror.page.search import search
from bdn.mirror.page.sources import Sources
from bdn.mirror.page.views import LONGEST, PageView
from bdn.net.api_server import EventStream
from bdn.net.request_bodies import KNOW

VIEWS: Final[tuple[PageView, ...]] = (NOW, CLUSTER, NODE, MIRRORS, MIRROR, MODEL, JOBS, JOB, EVICTION, PREFETCH)
_COOKIE: Final = "bdn_session"
_FOREVER: Final = {"Cache-Control": "public, max-age=31536000, immutable"}


@dataclass(frozen=True)
class PageParts:
    sources: Sources
    templates: Templates
    feeds: Feeds
    assets: Assets

    def answer(self, template: str, caller: Caller, status: int = 200, **context: object) -> Response:
        """A page of the template, with menu, search and log-out."""
        shown = [view for view in VIEWS if view.is_in_menu and (caller.team is None or view.is_for_teams)]
        menu = [(view.title, view.path) for view in shown]
        shared = {"caller": caller, "menu": menu, "has_session": self.sources.sessions.are_needed}
        return HTMLResponse(self.templates.page(template, {**shared, **context}), status)


async def _page(request: Request) -> PageParts:
    found: PageParts = request.app.state.page
    return found


ThePage = Annotated[PageParts, Depends(_page)]


async def _viewer(request: Request, page: ThePage) -> Caller:
    """The caller of the session. Raises ``UnauthenticatedError``."""
    caller = await page.sources.sessions.caller(session_of(request))
    if (know := request.scope.get("state", {}).get(KNOW)) is not None:
        know(caller.organisation)
    return caller


def session_of(request: Request) -> str | None:
    return request.cookies.get(_COOKIE)


Viewer = Annotated[Caller, Depends(_viewer)]


async def _sent_form(request: Request) -> dict[str, str]:
    check_same_origin(request)
    return await form_of(request)


async def _viewers_form(_: Viewer, form: Annotated[dict[str, str], Depends(_sent_form)]) -> dict[str, str]:
    return form


Form = Annotated[dict[str, str], Depends(_sent_form)]  # of any sender, of this origin
ViewersForm = Annotated[dict[str, str], Depends(_viewers_form)]  # read once the sender is known

access_router = APIRouter()
views_router = APIRouter()


@access_router.get(PATHS["login"])
async def login_page(
    page: ThePage, destination: Annotated[str, Query(alias="next", max_length=LONGEST)] = ""
) -> Response:
    if not page.sources.sessions.are_needed:
        return RedirectResponse(PATHS["now"], 303)
    return _login(page, destination)


@access_router.post(PATHS["login"])
async def log_in(request: Request, page: ThePage, form: Form) -> Response:
    token, destination = form.get("token", "").strip(), form.get("next", "")
    try:
        session_id = await page.sources.sessions.begin(token, form.get("organisation", "").strip() or None)
    except NotPermittedError as error:
        return _login(page, destination, error.message, 403)
    except UnauthenticatedError as error:
        return _login(page, destination, error.message, 401)
    answer = RedirectResponse(_within(destination), 303)
    answer.set_cookie(
        _COOKIE,
        session_id,
        max_age=SESSION_SECONDS,
        path=PATHS["now"],
        secure=_is_secure(request),
        httponly=True,
        samesite="strict",
    )
    return answer


@access_router.post(PATHS["logout"])
async def log_out(request: Request, page: ThePage, _: Form) -> Response:
    await page.sources.sessions.end(session_of(request))
    answer = RedirectResponse(PATHS["login"], 303)
    answer.delete_cookie(_COOKIE, path=PATHS["now"], secure=_is_secure(request), httponly=True, samesite="strict")
    return answer


@access_router.get("/ui/assets/{name}")
async def asset(page: ThePage, name: str) -> Response:
    if name not in page.assets.files:
        raise NotFoundError(f"asset {name[:100]}")
    content, kind = page.assets.files[name]
    return Response(content, media_type=kind, headers=_FOREVER)


@views_router.get(PATHS["search"])
async def find(page: ThePage, caller: Viewer, q: Annotated[str, Query(max_length=LONGEST)] = "") -> Response:
    found = await search(page.sources, caller, q.strip())
    if found.only is not None:
        return RedirectResponse(found.only, 303)
    return page.answer("search.html", caller, title="Search", found=found)


def _login(page: PageParts, destination: str, problem: str = "", status: int = 200) -> Response:
    context = {"destination": _within(destination), "problem": problem}
    return HTMLResponse(page.templates.page("login.html", context), status)


def _within(destination: str) -> str:
    """The address if it is one of this page, else the address of the first view."""
    is_ours = destination == PATHS["now"] or destination.startswith((f"{PATHS['now']}/", f"{PATHS['now']}?"))
    return destination if is_ours and destination.isascii() and destination.isprintable() else PATHS["now"]


def _is_secure(request: Request) -> bool:
    """Whether the browser speaks TLS, with this service or with a proxy in front of it."""
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto", "").lower())


_Answer = Callable[..., Awaitable[Response]]


def _page_of(view: PageView) -> _Answer:
    async def show(request: Request, page: ThePage, caller: Viewer) -> Response:
        asked = view.asked_by(request.query_params)
        snapshot = await page.feeds.of(view, caller, asked).get()
        live = f"/ui/live/{view.name}?{request.url.query}"
        return page.answer(
            view.template, caller, title=view.title, current=view.path, asked=asked, snapshot=snapshot, live=live
        )

    return show


def _stream_of(view: PageView) -> _Answer:
    async def stream(request: Request, page: ThePage, caller: Viewer) -> Response:
        asked = view.asked_by(request.query_params)
        await page.feeds.of(view, caller, asked).get()  # refuse before the stream begins
        since = request.headers.get("last-event-id") or request.query_params.get("since", "")
        return EventStream(page.feeds.stream(view, caller, asked, since, session_of(request)))

    return stream


def add_view(view: PageView) -> None:
    views_router.add_api_route(view.path, _page_of(view), methods=["GET"], name=view.name)
    views_router.add_api_route(f"/ui/live/{view.name}", _stream_of(view), methods=["GET"], name=f"{view.name} live")


for _view in VIEWS:
    add_view(_view)
