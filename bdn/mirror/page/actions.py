"""The forms that change something: plan an eviction, carry it out, undo it; prefetch."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import RedirectResponse, Response
from pydantic import ValidationError

from bdn.core.errors import InvalidRequestError, NotFoundError
from bdn.mirror.access.callers import Caller
from bdn.mirror.api import routes as api
from bdn.mirror.page.eviction_view import confirmed, plan_request, restorable
from bdn.mirror.page.operations import EVICTION
from bdn.mirror.page.rendering import PATHS, path_of
from bdn.mirror.page.routes import ThePage, Viewer, ViewersForm
from bdn.mirror.page.sources import Sources
from bdn.wire.access_schema import Role
from bdn.wire.operation_schema import PrefetchRequest, RestorationRequest

actions_router = APIRouter()


async def _of_all_teams(caller: Viewer) -> Caller:
    return caller.of_all_teams()


OfAllTeams = Annotated[Caller, Depends(_of_all_teams)]


@actions_router.post(PATHS["eviction"])
async def plan(page: ThePage, caller: OfAllTeams, form: ViewersForm) -> Response:
    """Records a dry run, which nodes answer. The view of the plan shows their answers as they come."""
    with _checked("node, source or tier"):
        request = plan_request(
            _what(form),
            tier=form.get("tier") or None,
            node=form.get("node", "").strip() or None,
            is_operator=caller.role is Role.OPERATOR,
        )
    planned = await api.evict(page.sources.operations, request, caller)
    return _to("eviction", planned.id)


@actions_router.post(f"{PATHS['eviction']}/confirm")
async def confirm(page: ThePage, caller: OfAllTeams, form: ViewersForm) -> Response:
    planned = await api.eviction(page.sources.operations, form.get("id", ""), caller)
    request = confirmed(planned, form.get("typed", ""), page.sources.now())
    done = await api.evict(page.sources.operations, request, caller)
    return _to("eviction", done.id)


@actions_router.post(f"{PATHS['eviction']}/undo")
async def undo(page: ThePage, caller: OfAllTeams, form: ViewersForm) -> Response:
    done = await api.eviction(page.sources.operations, form.get("id", ""), caller)
    restored = [one for one in restorable(done, page.sources.now()) if await _restore(page.sources, caller, one)]
    if not restored:
        raise NotFoundError("anything of this eviction that can still be restored")
    page.feeds.of(EVICTION, caller, {"id": done.id}).forget()
    return _to("eviction", done.id)


async def _restore(sources: Sources, caller: Caller, manifest: str) -> bool:
    with suppress(NotFoundError):  # it was collected, or restored, meanwhile
        await api.restore(sources.operations, RestorationRequest(manifest=manifest), caller)
        return True
    return False


@actions_router.post(PATHS["prefetch"])
async def prefetch(page: ThePage, caller: OfAllTeams, form: ViewersForm) -> Response:
    nodes = [line.strip() for line in form.get("nodes", "").splitlines() if line.strip()]
    with _checked("cluster or nodes"):
        request = PrefetchRequest(manifest=_what(form), cluster=form.get("cluster") or None, nodes=nodes)
    begun = await api.prefetch(page.sources.operations, request, caller)
    return _to("prefetch", begun.id)


@contextmanager
def _checked(fields: str) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise InvalidRequestError(f"{fields}: too long or unknown; go back, and correct the form") from error


def _what(form: dict[str, str]) -> str:
    if not (what := form.get("of", "").strip()):
        raise InvalidRequestError("the form names no source or manifest: go back to the model, and send its form")
    return what


def _to(view: str, operation_id: str) -> Response:
    return RedirectResponse(path_of(view, id=operation_id), 303)
