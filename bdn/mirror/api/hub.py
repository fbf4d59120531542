"""The route of hub gateways, which agents have."""

from typing import Annotated

from bdn.mirror.api.callers import Agent
from bdn.mirror.hub.gateway import HubGateway
from bdn.net.api_server import WaitSeconds, new_router, provided
from bdn.wire.hub_schema import HubAnswer, HubRequest

_Gateway = Annotated[HubGateway, provided(HubGateway)]

hub_router = new_router("hub")


@hub_router.post("/hub", summary="Answer a request of a hub client, which an agent's gateway passes on")
async def answer(gateway: _Gateway, caller: Agent, body: HubRequest, wait: WaitSeconds = 0) -> HubAnswer:  # noqa: ARG001 - it must be an agent
    return await gateway.answer(body, wait)
