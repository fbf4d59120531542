"""Checks of a route's caller, and the patterns of ids and names in its path."""

from typing import Annotated, Any, Final

from fastapi import Depends, Header, Path, Query

from bdn.core.source.uri import PROJECT_PATTERN
from bdn.mirror.access.access import Access, PushAccess
from bdn.mirror.access.callers import Caller
from bdn.net.api_server import Bearer, provided
from bdn.wire.access_schema import NAME_PATTERN, ORGANISATION_PATTERN, Role
from bdn.wire.grants import Grant
from bdn.wire.http_fields import AGENT_HEADER, ORGANISATION_HEADER

TEXT: Final = r"^[^\x00]*$"


def _id(prefix: str) -> Any:  # noqa: ANN401 - what FastAPI makes of it
    return Path(pattern=rf"^{prefix}_[0-9a-f]{{24}}$")


MirrorId = Annotated[str, _id("mir")]
EvictionId = Annotated[str, _id("evi")]
PrefetchId = Annotated[str, _id("pre")]
VerificationId = Annotated[str, _id("ver")]
CollectionId = Annotated[str, _id("col")]
CheckpointId = Annotated[str, _id("chk")]
TokenId = Annotated[str, _id("tok")]
SecretName = Annotated[str, Path(pattern=f"^{NAME_PATTERN}$")]
ProjectName = Annotated[str, Path(pattern=f"^{PROJECT_PATTERN}$")]
Name = Annotated[str | None, Query(max_length=256, pattern=TEXT)]

Organisation = Annotated[
    str | None,
    Header(
        alias=ORGANISATION_HEADER,
        pattern=f"^{ORGANISATION_PATTERN}$",
        description="The organisation that an operator acts for; other callers act for their own",
    ),
]

AgentToken = Annotated[
    str | None,
    Header(alias=AGENT_HEADER, description="The token of an agent that sends a job's grant as its bearer token"),
]

_Access = Annotated[Access, provided(Access)]


async def _operator(access: _Access, bearer: Bearer, organisation: Organisation = None) -> Caller:
    return (await access.caller(bearer)).acting(Role.OPERATOR, organisation)


async def _controller(access: _Access, bearer: Bearer, organisation: Organisation = None) -> Caller:
    return (await access.caller(bearer)).acting(Role.CONTROLLER, organisation).of_all_teams()


async def _controller_of_a_team(access: _Access, bearer: Bearer, organisation: Organisation = None) -> Caller:
    return (await access.caller(bearer)).acting(Role.CONTROLLER, organisation)


async def _requester(access: _Access, bearer: Bearer, organisation: Organisation = None) -> Caller:
    caller = await access.caller(bearer)
    return caller.acting(Role.POD if caller.role is Role.POD else Role.CONTROLLER, organisation)


async def _lister(access: _Access, bearer: Bearer, organisation: Organisation = None) -> Caller | Grant:
    return await access.lister(bearer, organisation)


async def _agent(access: _Access, bearer: Bearer) -> Caller:
    return (await access.caller(bearer)).acting(Role.AGENT, None)


async def _rank_caller(access: _Access, bearer: Bearer) -> Caller:
    caller = await access.caller(bearer)
    return caller.acting(Role.POD if caller.role is Role.POD else Role.AGENT, None)


async def _pusher(access: _Access, bearer: Bearer, organisation: Organisation = None) -> PushAccess:
    return await access.pusher(bearer, organisation)


Operator = Annotated[Caller, Depends(_operator)]
Controller = Annotated[Caller, Depends(_controller)]  # or an operator, for the organisation that it names
TeamController = Annotated[Caller, Depends(_controller_of_a_team)]  # or a controller of a team, which routes pass on
Requester = Annotated[Caller, Depends(_requester)]  # as TeamController, or a pod, whose team is its namespace's
Lister = Annotated[Caller | Grant, Depends(_lister)]  # as TeamController, or a grant
Agent = Annotated[Caller, Depends(_agent)]
RankCaller = Annotated[Caller, Depends(_rank_caller)]  # an agent, or a pod, which may be a rank
Pushing = Annotated[PushAccess, Depends(_pusher)]
