"""A cluster with a job that stages, a planned and a real eviction, and a prefetch: what the views of operations show."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from bdn.mirror.db.database import Database
from tests.support.mirror.page_world import GB, MODELS, PageWorld, fill, held, manifest_of
from tests.support.mirror.service import Json
from tests.support.mirror.training_jobs import JobAgent, JobClient, spec

_STAGED = (137 * GB, 61 * GB, 12 * GB, 98 * GB)  # bytes of each rank


def stage(job: str, done: int, total: int, **fields: Any) -> Json:
    """A stage in a heartbeat."""
    given: Json = {"id": "stg_1", "job": job, "mirror_id": None, "manifests": [], "state": "STAGING", "since": 1e9}
    return given | {"bytes_done": done, "bytes_total": total, "bytes_per_second": None, "error": None} | fields


async def fill_operations(world: PageWorld, nodes: int = 24) -> Mapping[str, str]:
    """``fill``, and operations of each kind. Returns the address of each view."""
    await fill(world, nodes)
    job, agent = await _job(world)
    source, kept = MODELS[1][0], MODELS[2][0]
    plan = await _plan(world, job, agent)
    gone = await world.mirror.ask("evictions", source=kept, tier="mirror", force=True)
    prefetch = await world.mirror.ask("prefetches", source=source, cluster="iad-h200")
    failed = (await world.mirror.get("/mirror", status="FAILED"))["items"][0]["id"]
    return {
        "mirrors": "/ui/mirrors",
        "mirror": f"/ui/mirror?id={failed}",
        "models": "/ui/model",
        "model": f"/ui/model?of={quote(source)}",
        "model on a node": f"/ui/model?of={quote(source)}&node=h200-005",
        "path": "/ui/model?of=/models/m",
        "jobs": "/ui/jobs",
        "job": f"/ui/job?id={job}",
        "plan": f"/ui/eviction?id={plan['id']}",
        "eviction": f"/ui/eviction?id={gone['id']}",
        "prefetch": f"/ui/prefetch?id={prefetch['id']}",
    }


async def _plan(world: PageWorld, job: str, agent: JobAgent) -> Json:
    """A plan to evict what the job stages on one node, which has answered."""
    source, place = MODELS[0][0], {"cluster": agent.state["cluster"], "node": agent.state["node"]}
    plan = await world.mirror.ask("evictions", source=source, dry_run=True, force=True, **place)
    item = {"tier": "node", "manifest": f"b3:{manifest_of(source)}", "bytes": _STAGED[2], "sources": [source], **place}
    answer = {"id": plan["id"], "evict": {"items": [item | {"holders": [f"job {job} (stage stg_1)"]}]}}
    await agent.beat(reports=[answer, *agent.running.values()], holdings=None)
    return plan


async def _job(world: PageWorld) -> tuple[str, JobAgent]:
    """A training job that stages on four nodes, one of them far behind; and the agent of that node."""
    agents = [JobAgent(world.mirror, f"train-{rank}", cluster="iad-h200") for rank in range(len(_STAGED))]
    for agent in agents:
        await agent.beat()
    job = await (await JobClient.of(world.mirror, "llama-sft")).create(spec(nodes=len(agents), name="sft-70b"))
    for _ in range(2):
        await world.mirror.service.controller.look()
    total = MODELS[0][1]
    for agent, done in zip(agents, _STAGED, strict=True):
        command = await agent.commanded("stage")
        await agent.report(command, "STAGING", running=True, bytes_done=done, bytes_total=total)
        told = stage(job, done, total, bytes_per_second=done // 60)
        holding = held(MODELS[0][0], done, jobs=[job], complete=False)
        await agent.beat(stages=[told], reports=list(agent.running.values()), holdings=[holding])
    mirror = await world.add_mirror(MODELS[0][0], "READY", size=total, age=900)
    await _mirrored(world.mirror.service.requests.database, job, mirror)
    return job, agents[2]


async def _mirrored(database: Database, job: str, mirror: str) -> None:
    """Name the mirror that brought the job's weights: no worker is at work here."""
    async with database.write() as session:
        connection = await session.connection()
        await connection.exec_driver_sql(f"UPDATE training_jobs SET mirror_id = '{mirror}' WHERE id = '{job}'")
