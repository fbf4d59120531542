"""An agent as the mirror sees it: heartbeats that say what a test tells them to say."""

from typing import Any, Final

from tests.support.mirror.service import Json, MirrorUnderTest

USE: Final = {"budget": 1000, "committed": 300, "reserved": 20, "leased": 100, "pressed": 0}


class FakeAgent:
    """``holdings`` are all that it holds, told anew in each heartbeat; None: nothing is told of them."""

    def __init__(self, mirror: MirrorUnderTest, node: str, cluster: str = "c", **state: Any) -> None:
        self._mirror = mirror
        self.state: Json = {"node": node, "cluster": cluster, "boot_id": "b", "roles": ["node"], "version": "1.2"}
        self.state |= {"advertise": f"http://{node}:8471", "tiers": {"node": USE}, "holdings": [], **state}

    async def beat(self, **changes: Any) -> Json:
        said = {**self.state, **changes}
        if (held := said.pop("holdings")) is not None:
            said["changes"] = {"base": None, "digest": "", "held": held}
        answer = await self._mirror.http.post("/agents/heartbeat", json=said)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def beat_as(self, headers: dict[str, str]) -> Json:
        """With another token than that of the mirror's client."""
        answer = await self._mirror.http.post("/agents/heartbeat", json=self.state, headers=headers)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def carry_out(self, reply: Json, *items: Json) -> Json:
        (command,) = reply["pending"]
        report = {"id": command["id"], "evict": {"items": list(items)}}
        return await self.beat(reports=[report])
