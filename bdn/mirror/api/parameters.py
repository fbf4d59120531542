"""What routes take: who may call them (``caller: Controller``), whom they act for, and where a page begins."""

import base64
import binascii
from typing import Annotated

from fastapi import Depends, Header

from bdn.core.errors import InvalidRequestError
from bdn.mirror.access import Access
from bdn.net.api_server import Bearer, provided
from bdn.wire.access_schema import ORGANISATION_PATTERN, Caller, Role
from bdn.wire.http_fields import ORGANISATION_HEADER

Organisation = Annotated[
    str | None,
    Header(
        alias=ORGANISATION_HEADER,
        pattern=f"^{ORGANISATION_PATTERN}$",
        description="Whom an operator acts for; others: themselves",
    ),
]

_Access = Annotated[Access, provided(Access)]


async def _operator(access: _Access, bearer: Bearer, organisation: Organisation = None) -> Caller:
    return (await access.caller(bearer)).acting(Role.OPERATOR, organisation)


async def _controller(access: _Access, bearer: Bearer, organisation: Organisation = None) -> Caller:
    return (await access.caller(bearer)).acting(Role.CONTROLLER, organisation)


async def _agent(access: _Access, bearer: Bearer) -> Caller:
    return (await access.caller(bearer)).acting(Role.AGENT, None)


Operator = Annotated[Caller, Depends(_operator)]
Controller = Annotated[Caller, Depends(_controller)]  # an operator is one, too, for the organisation that it names
Agent = Annotated[Caller, Depends(_agent)]


def write_cursor(at: float, row_id: str) -> str:
    """Where the next page of rows begins: after the row of this time and id."""
    return base64.urlsafe_b64encode(f"{at!r} {row_id}".encode()).decode()


def read_cursor(cursor: str | None) -> tuple[float, str] | None:
    """What ``write_cursor`` wrote. Raises ``InvalidRequestError``."""
    if cursor is None:
        return None
    try:
        at, row_id = base64.urlsafe_b64decode(cursor.encode()).decode().split(" ")
        return float(at), row_id
    except (ValueError, binascii.Error):
        raise InvalidRequestError("cursor is not one of ours; leave it away for the first page") from None
