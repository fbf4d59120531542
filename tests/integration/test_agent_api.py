"""The control API over its unix socket, as commands and job controllers use it."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx2

from bdn.local.running_agent import RunningAgent
from bdn.net.api_server import bind_tcp, serving
from bdn.wire.stage_schema import StageRequest
from node_agent.api import build_app
from tests.support.agent.mirror import AgentMirror, flipped, fresh_mirror, held_by
from tests.support.agent.rig import Rig, metrics
from tests.support.agent.site import serving_agent
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror

FILES = {"weights": noise(MIB, 1), "config.json": b"{}"}


async def test_a_stage_is_accepted_then_ready_then_released(rig: Rig, mirror: AgentMirror) -> None:
    manifest = mirror.publish(FILES)
    async with serving_agent(rig) as site:
        body = {"job_id": "job", "grant": mirror.grant(manifest)}
        accepted = await site.http.post("/stages", json=body)
        assert accepted.status_code == 202
        assert accepted.json()["state"] in ("STAGING", "READY")

        ready = await site.client.stage_by_id(accepted.json()["id"], 30)
        assert ready.state == "READY"
        assert tree(Path(ready.mounts[0].path)) == FILES
        assert [stage.id for stage in (await site.client.stages()).items] == [ready.id]

        assert (await site.client.unstage(ready.id)).state == "RELEASED"
        assert (await site.client.unstage(ready.id)).state == "RELEASED"


async def test_waiting_answers_when_the_stage_is_ready_and_its_time_is_renewed(rig: Rig, mirror: AgentMirror) -> None:
    manifest = mirror.publish(FILES)
    async with serving_agent(rig) as site:
        body = {"job_id": "job", "grant": mirror.grant(manifest), "wait": True, "ttl_seconds": 60}
        answer = await site.http.post("/stages", json=body)

        assert (answer.status_code, answer.json()["state"]) == (201, "READY")
        stage = answer.json()
        again = await site.http.post("/stages", json=body)
        assert (again.status_code, again.json()["id"]) == (201, stage["id"])
        renewed = (await site.http.post(f"/stages/{stage['id']}/renew", json={"ttl_seconds": 3600})).json()
        endless = (await site.http.post(f"/stages/{stage['id']}/renew", json={})).json()
        assert renewed["expires_at"] > stage["expires_at"]
        assert endless["expires_at"] is None


async def test_a_wait_that_ends_in_failure_answers_with_the_error(rig: Rig, mirror: AgentMirror) -> None:
    manifest = mirror.publish(FILES)
    for chunk in mirror.chunks(manifest, "weights"):
        mirror.faults[chunk] = [flipped, flipped]
    async with serving_agent(rig) as site:
        answer = await site.http.post("/stages", json={"job_id": "j", "grant": mirror.grant(manifest), "wait": True})

        error = answer.json()["error"]
        assert (error["code"], error["retryable"]) == ("CHECKSUM_MISMATCH", False)
        assert str(mirror.chunks(manifest, "weights")[0]) in error["message"]
        failed = (await site.client.stages()).items[0]
        assert failed.state == "FAILED"
        assert failed.error is not None
        assert failed.error.model_dump() == error


async def test_events_tell_progress_until_it_is_done(rig: Rig, mirror: AgentMirror) -> None:
    manifest = mirror.publish({"large": noise(17 * MIB, 2)})
    chunks, gate = mirror.chunks(manifest, "large"), threading.Event()
    mirror.faults[chunks[2]] = [held_by(gate)]
    async with serving_agent(rig) as site:
        stage = await site.client.stage(StageRequest(job_id="job", grant=mirror.grant(manifest)))
        events: list[tuple[str, dict[str, Any]]] = []
        async with site.http.stream("GET", f"/stages/{stage.id}/events", timeout=30) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            name = ""
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                if line.startswith("data: "):
                    events.append((name, json.loads(line.removeprefix("data: "))))
                    if events[-1][1]["mounts"][0]["bytes_done"] == 16 * MIB:
                        gate.set()

        assert [name for name, _ in events[:-1]] == ["progress"] * (len(events) - 1)
        assert events[-1][0] == "done"
        done = [event["mounts"][0]["bytes_done"] for _, event in events]
        assert done == sorted(done)
        assert 16 * MIB in done
        assert done[-1] == 17 * MIB
        assert events[-1][1]["state"] == "READY"
        unknown = await site.http.get("/stages/stg_unknown/events")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "NOT_FOUND")


async def test_a_wait_for_a_stage_ends_with_its_time(rig: Rig, mirror: AgentMirror) -> None:
    manifest, gate = mirror.publish(FILES), threading.Event()
    mirror.every = held_by(gate)
    async with serving_agent(rig) as site:
        stage = await site.client.stage(StageRequest(job_id="job", grant=mirror.grant(manifest)))
        waited = await site.client.stage_by_id(stage.id, 0.01)
        assert waited.state == "STAGING"
        gate.set()
        assert (await site.client.stage_by_id(stage.id, 30)).state == "READY"


REFUSED = [
    ("POST", "/stages", {"job_id": "j"}, 422, "INVALID_REQUEST", "grant: Field required"),
    ("POST", "/stages", {"job_id": "j", "grant": "g", "colour": 1}, 422, "INVALID_REQUEST", "colour: is not a known"),
    ("POST", "/stages", {"job_id": "j", "grant": "g", "ttl_seconds": 0}, 422, "INVALID_REQUEST", "ttl_seconds: "),
    ("POST", "/stages", {"job_id": "j", "grant": "g", "warm": "yes"}, 422, "INVALID_REQUEST", "warm: "),
    ("POST", "/stages", {"job_id": "j", "grant": "rubbish"}, 403, "GRANT_INVALID", "the grant is not valid"),
    ("POST", "/stages", {"job_id": "j", "grant": "x" * 70_000}, 413, "LIMIT_EXCEEDED", "over the limit of 65536"),
    ("GET", "/stages/stg_unknown", None, 404, "NOT_FOUND", "stage stg_unknown"),
    ("DELETE", "/stages/stg_unknown", None, 404, "NOT_FOUND", "stage stg_unknown"),
    ("GET", "/stages/stg_unknown?wait=61", None, 422, "INVALID_REQUEST", "wait: "),
    ("GET", "/nowhere", None, 404, "NOT_FOUND", "path /nowhere"),
    ("PUT", "/stages", None, 405, "INVALID_REQUEST", "PUT /stages: Method Not Allowed; this path accepts GET, POST"),
    ("PUT", "/stages/stg_1", None, 405, "INVALID_REQUEST", "this path accepts DELETE, GET"),
]


async def test_errors_are_documents_that_name_what_is_wrong(rig: Rig) -> None:
    async with serving_agent(rig, limit_request_bytes="64KiB") as site:
        for method, path, body, status, code, words in REFUSED:
            answer = await site.http.request(method, path, json=body)

            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert words in answer.json()["error"]["message"]


async def test_the_cache_says_what_it_holds_and_for_whom(rig: Rig, mirror: AgentMirror) -> None:
    one, two = mirror.publish(FILES), mirror.publish({"other": b"other"})
    async with serving_agent(rig, cache_bytes=10 * MIB) as site:
        for job, manifest in (("one", one), ("two", two)):
            await site.client.stage(StageRequest(job_id=job, grant=mirror.grant(manifest), wait=True))
        await site.client.unstage((await site.client.stages()).items[0].id)

        cache = await site.client.cache()

        assert cache.tiers["node"].model_dump() == {
            "budget": 10 * MIB,
            "committed": MIB + 7,
            "reserved": 0,
            "leased": MIB + 2,
            "pressed": 0,
            "problem": None,
        }
        assert [(held.manifest, held.complete, held.held_by) for held in cache.manifests] == [
            (str(one.digest), True, ["one"]),
            (str(two.digest), True, []),
        ]
        assert cache.manifests[0].sources == ["hf://org/model-0"]


EXPECTED = {
    'bdn_agent_stages{state="READY"}': 1,
    'bdn_agent_stages{state="FAILED"}': 0,
    'bdn_agent_fill_bytes_total{tier="mirror"}': MIB + 2,
    'bdn_agent_cache_budget_bytes{tier="node"}': 10 * MIB,
    'bdn_agent_cache_committed_bytes{tier="node"}': MIB + 2,
    'bdn_agent_cache_leased_bytes{tier="node"}': MIB + 2,
    'bdn_agent_cache_reserved_bytes{tier="node"}': 0,
    'bdn_agent_cache_budget_bytes{tier="cluster"}': MIB,
    'bdn_agent_cache_committed_bytes{tier="cluster"}': 0,
    "bdn_agent_verification_failures_total": 1,
    "bdn_agent_ready_seconds_count": 1,
}


async def test_health_metrics_and_documentation_are_served(rig: Rig, mirror: AgentMirror) -> None:
    manifest = mirror.publish(FILES)
    mirror.faults[mirror.chunks(manifest, "weights")[0]] = [flipped]
    async with serving_agent(rig, cache_bytes=10 * MIB) as site:
        await site.client.stage(StageRequest(job_id="job", grant=mirror.grant(manifest), wait=True))

        assert (await site.http.get("/healthz")).status_code == 200
        assert await site.client.ready()
        figures = metrics((await site.http.get("/metrics")).text)
        assert {name: figures[name] for name in EXPECTED} == EXPECTED
        assert "text/html" in (await site.http.get("/docs")).headers["content-type"]


# --- pulls, for the agent's own user ---


async def test_a_pull_over_the_socket_is_checked_carried_out_and_followed(
    rig: Rig, mirror: AgentMirror, tmp_path: Path
) -> None:
    manifest, other, dest = mirror.publish(FILES), mirror.publish({"other": b"x"}), tmp_path / "models/one"
    loop, long = tmp_path / "loop", str(tmp_path / ("a" * 300))
    loop.symlink_to(loop)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_bytes(b"")
    async with serving_agent(rig) as site:
        body = {"destination": str(dest), "grant": mirror.grant(manifest)}
        checked = await site.http.post("/pulls/checks", json=body)
        assert (checked.status_code, checked.json()) == (200, {"earlier": "", "lost": []})
        assert not dest.exists()
        begun = await site.http.post("/pulls", json={**body, "link": True})
        assert begun.status_code == 202
        ready = await site.client.stage_by_id(begun.json()["id"], 30)
        assert (ready.state, ready.mounts[0].path, ready.mounts[0].view) == ("READY", str(dest), "hardlink")
        assert tree(dest) == FILES
        lost = await site.http.post("/pulls/checks", json={**body, "grant": mirror.grant(other)})
        assert lost.json() == {"earlier": str(manifest.digest), "lost": sorted(FILES)}
        for path in ("/pulls", "/pulls/checks"):
            for wrong in ("relative", "/a\0b", "", str(tmp_path / "mine"), str(rig.cache), long, str(loop)):
                refused = await site.http.post(path, json={**body, "destination": wrong})
                assert (refused.status_code, refused.json()["error"]["code"]) == (422, "INVALID_REQUEST")


async def test_a_pull_over_the_port_is_refused_and_writes_nothing(
    rig: Rig, mirror: AgentMirror, tmp_path: Path
) -> None:
    body = {"destination": str(tmp_path / "out"), "grant": mirror.grant(mirror.publish(FILES))}
    async with rig.agent() as agent:
        listener = bind_tcp("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with serving(build_app(agent), listener, is_local=True), httpx2.AsyncClient(base_url=url) as http:
            for path in ("/pulls", "/pulls/checks"):
                refused = await http.post(path, json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "UNAUTHENTICATED")
            assert (await http.get("/stages")).json() == {"items": []}
    assert not (tmp_path / "out").exists()


async def test_a_pull_that_is_interrupted_ends_on_the_agent_too(rig: Rig, mirror: AgentMirror, tmp_path: Path) -> None:
    manifest, gate, begun = mirror.publish(FILES), threading.Event(), asyncio.Event()
    mirror.every = held_by(gate)
    async with serving_agent(rig) as site:

        async def pull() -> None:
            async for _ in RunningAgent(site.client).pull(mirror.grant(manifest), tmp_path / "out", link=False):
                begun.set()

        async with asyncio.TaskGroup() as group:
            pulling = group.create_task(pull())
            await begun.wait()
            pulling.cancel()
            gate.set()
        assert [stage.state for stage in (await site.client.stages()).items] == ["RELEASED"]
    assert not list(tmp_path.glob("*out*"))  # noqa: ASYNC240 - a test's loop serves no other clients
