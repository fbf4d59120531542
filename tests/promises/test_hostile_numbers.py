"""Agents that say numbers which nothing has: every number of a heartbeat, and of each kind of event, on both databases."""

import json
import math
from collections.abc import AsyncIterator, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import httpx2
import pytest

from bdn.core.events import KINDS
from bdn.mirror.db import events
from bdn.mirror.db.database import Database
from bdn.mirror.db.events import Events
from bdn.wire.event_schema import EventDocument, NodeEvent
from bdn.wire.heartbeat_schema import Heartbeat
from bdn.wire.shapes import Page
from tests.doubles.hub import Hub
from tests.fakes.clock import Clock
from tests.support.mirror.backends import behind
from tests.support.mirror.fake_agent import USE
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, source
from tests.support.promises.tally import Tally, at_scale

pytestmark = [pytest.mark.promise("hostile-input"), pytest.mark.usefixtures("backend")]
pytest_plugins = ("tests.support.mirror.fixtures",)

NUMBERS: Final = (2**63 - 1, 10**400, math.inf, 10**30, 1e18, -1, -(10**30), 1e308, -1e308, math.nan)
FEW: Final = 3  # of them find most
DAY: Final = 86400.0
Place = tuple[str | int, ...]


@pytest.fixture
async def either(
    hub: Hub, upstreams: None, database_options: dict[str, Any], tmp_path: Path
) -> AsyncIterator[MirrorUnderTest]:
    """A mirror that holds a model, on either database."""
    hub.repo("org/model").commit({"a.txt": b"12345"})
    async with mirror_under_test(tmp_path / "mirror", scrub_seconds=0, **database_options) as mirror:
        await mirror.ready(source("hf://org/model"))
        yield mirror


RUN: Final[Json] = {
    "run": "0" * 10,
    "rank": 0,
    "state": "RUNNING",
    "bytes_done": 5,
    "bytes_total": 5,
    "eta_seconds": 1.5,
    "exit_code": 0,
    "scratch_bytes": 1,
    "scratch_limit_bytes": 2,
}


def heartbeat(manifest: str, node: str = "n") -> Json:
    """One with everything in it, but for the names of what it answers."""
    return {
        "node": node,
        "cluster": "c",
        "boot_id": "b",
        "roles": ["node"],
        "advertise": None,
        "version": "1.2",
        "tiers": {"node": USE},
        "changes": {
            "base": None,
            "digest": "",
            "held": [{"manifest": manifest, "bytes": 5, "last_used": 1.0, "cluster_bytes": 0}],
        },
        "reports": [
            {"id": "", "evict": {"items": [{"tier": "node", "manifest": manifest, "bytes": 5}]}},
            {
                "id": "",
                "prefetch": {"bytes_total": 5, "bytes_from": {"node": 1, "cluster": 2, "mirror": 2}},
                "error": {"code": "CACHE_FULL", "message": "full", "retryable": False, "details": {"needed": 5}},
            },
            {"id": "", "verify": {"chunks_read": 1, "bytes_read": 5}},
            {"id": f"run:{'0' * 10}:0:go", "running": True, "run": RUN},
        ],
        "events": [{"id": f"{node}/1", "at": 1.8e9, "kind": "other", "manifest": manifest, "facts": {"size": 5}}],
        "epoch": 1,
        "unsynced_bytes": 5,
        "capacity": {"gpu_type": "H200", "gpus": 8, "cpus": 8, "memory_bytes": 5, "slots": 1, "launcher": "podman"},
        "stages": [
            {
                "id": "stg_1",
                "job": "train",
                "mirror_id": None,
                "manifests": [manifest],
                "state": "STAGING",
                "bytes_done": 1,
                "bytes_total": 5,
                "bytes_per_second": 1,
                "since": 1.8e9,
                "error": None,
            }
        ],
        "state_at": 5.0,
        "wait_seconds": 0,
    }


def numbers_of(document: Any, before: Place = ()) -> Iterator[Place]:
    """Where the numbers stand in it."""
    if isinstance(document, int | float) and not isinstance(document, bool):
        yield before
    elif isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield from numbers_of(value, (*before, key))


def with_number(document: Json, path: Place, number: float) -> Json:
    changed = deepcopy(document)
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = number
    return changed


def is_number(schema: Json) -> bool:
    return schema.get("type") in ("integer", "number") or any(map(is_number, schema.get("anyOf", ())))


def facts_of(kind: str, **numbers: float) -> Json:
    """Facts that are those of the kind."""
    values: dict[type, object] = {str: "x", bool: True, list: [], int: 1, float: 1}
    return {name: values[known.types[0]] for name, known in KINDS[kind].facts.items()} | numbers


@dataclass
class Asker:
    """Sends what agents say, looks at what that makes, and keeps the answers that no input may have."""

    http: httpx2.AsyncClient
    tally: Tally
    wrong: list[str] = field(default_factory=list)

    async def beat(self, body: Json, said: str = "as it should be") -> None:
        """It is taken, or refused for what is wrong with it."""
        content = json.dumps(body)  # which writes Infinity and NaN, as hostile agents do
        answer = await self.http.post(
            "/agents/heartbeat", content=content, headers={"content-type": "application/json"}
        )
        self.tally.add(scenarios=1, refused=answer.status_code == 422)
        self._note(answer, (200, 422), said)

    async def look(self, said: str, *also: str) -> None:
        """Whatever shows what agents said answers."""
        for path in (
            "/agents",
            "/clusters",
            "/manifests",
            "/metrics",
            "/events?limit=1000",
            "/stages?job=train",
            *also,
        ):
            self._note(await self.http.get(path), (200,), f"{path}, after {said}")

    def _note(self, answer: httpx2.Response, expected: Collection[int], said: str) -> None:
        if answer.status_code not in expected:
            self.wrong.append(f"{said}: {answer.status_code} {answer.text[:300]}")


async def test_any_number_may_come_in_a_heartbeat(either: MirrorUnderTest, tally: Tally) -> None:
    asker = Asker(either.http, tally)
    manifest = (await either.http.get("/manifests")).json()["items"][0]["manifest"]
    numbers = NUMBERS[: at_scale(FEW, len(NUMBERS))]
    nodes = [f"n{number}" for number in range(len(numbers) + 1)]  # the last says nothing unusual, after all others
    for node in nodes:
        await asker.beat(heartbeat(manifest, node) | {"events": []})
    assert not tally.counts["refused"]
    for path in numbers_of(heartbeat(manifest)):
        where, asked = "", []  # what the number is an answer to
        if path[:2] == ("reports", 3):
            asked = [str(heartbeat(manifest)["reports"][3]["id"])]
        elif path[0] == "reports":
            where, request = (
                ("/evictions", {"manifest": manifest, "tier": "node"}),
                ("/prefetches", {"manifest": manifest, "nodes": nodes}),
                ("/verifications", {"manifest": manifest}),
            )[int(path[1])]
            answer = await either.http.post(where, json=request)
            assert answer.status_code == 202, answer.text
            asked = [answer.json()["id"]]
        for node, number in zip(nodes, (*numbers, None), strict=True):
            body = heartbeat(manifest, node)
            body = body if number is None else with_number(body, path, number)
            body["events"][0]["id"] = f"{node}/{'_'.join(map(str, path))}"
            body["reports"] = [body["reports"][int(path[1])] | {"id": one} for one in asked]
            await asker.beat(body, f"{path} {number!r:.6}")
        await asker.look(str(path), *(f"{where}/{one}" for one in asked if where))
    assert asker.wrong == []


async def test_a_date_that_is_far_off_goes_in_time(hub: Hub, upstreams: None, tmp_path: Path, tally: Tally) -> None:
    clock = Clock()
    database = Database(behind(tmp_path / "m").database_url)
    keeping = Events(database, 30 * DAY, clock)
    hub.repo("org/model").commit({"a.txt": b"12345"})
    ahead, late, early = (1e18, 1e308, 1.8e9 + 2 * DAY), (-1e18, -1e308, -1.0), (1.8e9 + DAY, 0.0)
    async with mirror_under_test(tmp_path / "m", clock=clock) as mirror:
        manifest = (await mirror.ready(source("hf://org/model")))["sources"][0]["manifest"]
        asker = Asker(mirror.http, tally)

        def event(at: float, told: str) -> Json:
            return {"id": f"{told}/{at!r}".replace(".", "_").replace("+", ""), "at": at, "kind": "x", "facts": {}}

        async def shown() -> dict[str, str]:
            answer = await mirror.http.get("/events", params={"manifest": manifest})
            assert answer.status_code == 200, answer.text
            assert Page[EventDocument].model_validate_json(answer.content).items
            return {one["id"]: one["at"] for one in answer.json()["items"] if one["kind"] == "x"}

        told = [event(at, "told") | {"manifest": manifest} for at in (*ahead, *late, *early)]
        await asker.beat(heartbeat(manifest) | {"events": told})
        assert set((await shown()).values()) == {"2027-01-15T08:00:00Z", "2027-01-16T08:00:00Z", "1970-01-01T00:00:00Z"}
        # As mirrors kept them that believed every clock.
        kept = [NodeEvent.model_validate(event(at, "kept") | {"manifest": manifest}) for at in (*ahead, *late)]
        with patch.object(events, "_believable", lambda at, _: at):
            await keeping.record("c", "n", kept)
        dates = await shown()
        assert dates[kept[0].id] == dates[kept[1].id] == "9999-12-31T23:59:59Z"
        assert dates[kept[3].id] == dates[kept[4].id] == "0001-01-01T00:00:00Z"

        await keeping.expire()
        assert set((await shown()).values()) == {"2027-01-15T08:00:00Z", "2027-01-16T08:00:00Z", "2027-01-17T08:00:00Z"}
        clock.now += 32 * DAY + 1
        await keeping.expire()
        assert await keeping.page("default", events.Wanted(), None, 100) == ([], None)
    await database.close()
    assert asker.wrong == []


async def test_any_number_may_come_in_any_event(either: MirrorUnderTest, tally: Tally) -> None:
    asker = Asker(either.http, tally)
    manifest = (await either.http.get("/manifests")).json()["items"][0]["manifest"]
    for which, number in enumerate(NUMBERS[: at_scale(FEW, len(NUMBERS))]):
        told = [
            {
                "id": f"{which}/{kind}/{name}",
                "at": 1.8e9,
                "kind": kind,
                "manifest": manifest,
                "facts": facts_of(kind, **{name: number}),
            }
            for kind in KINDS
            for name, fact in facts_of(kind).items()
            if fact == 1 and fact is not True
        ]
        assert len(told) > 30
        await asker.beat(heartbeat(manifest) | {"events": told}, f"events with {number!r:.6}")
        await asker.look(f"events with {number!r:.6}")
    assert asker.wrong == []


def test_the_heartbeat_that_is_tried_has_every_number_that_one_may_have() -> None:
    schema = Heartbeat.model_json_schema()

    def numbers_in(form: Json) -> set[str]:
        form = schema["$defs"][form["$ref"].rpartition("/")[2]] if "$ref" in form else form
        found = {name for name, one in form.get("properties", {}).items() if is_number(one)}
        parts = [*form.get("properties", {}).values(), *form.get("anyOf", ()), form.get("items", {})]
        parts.append(form["additionalProperties"] if isinstance(form.get("additionalProperties"), dict) else {})
        return found.union(*map(numbers_in, parts)) if form else found

    tried = {path[-1] for path in numbers_of(heartbeat(f"b3:{'1' * 64}"))}
    assert tried == numbers_in(schema) | {"size", "needed"}  # a fact, and a detail of an error
