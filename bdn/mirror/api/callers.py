"""What a route says of who may call it: ``caller: Controller``. Looked at before anything else of the request."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Request

from bdn.core.caller import ORGANISATION_PATTERN, Caller, Role
from bdn.mirror.access.access import Access
from bdn.net.api_server.service import Bearer
from bdn.wire.http_fields import ORGANISATION_HEADER

Organisation = Annotated[
    str | None,
    Header(
        alias=ORGANISATION_HEADER,
        pattern=f"^{ORGANISATION_PATTERN}$",
        description="Whom an operator acts for; others: themselves",
    ),
]


def access_of(request: Request) -> Access:
    """The application's own; ``open_mirror`` put it there."""
    access: Access = request.app.state.access
    return access


async def _operator(request: Request, bearer: Bearer, organisation: Organisation = None) -> Caller:
    return (await access_of(request).caller(bearer)).acting(Role.OPERATOR, organisation)


async def _controller(request: Request, bearer: Bearer, organisation: Organisation = None) -> Caller:
    return (await access_of(request).caller(bearer)).acting(Role.CONTROLLER, organisation)


async def _agent(request: Request, bearer: Bearer) -> Caller:
    return (await access_of(request).caller(bearer)).acting(Role.AGENT, None)


Operator = Annotated[Caller, Depends(_operator)]
Controller = Annotated[Caller, Depends(_controller)]  # an operator is one, too, for the organisation that it names
Agent = Annotated[Caller, Depends(_agent)]
