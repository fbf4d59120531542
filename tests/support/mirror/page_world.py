"""A mirror with made-up agents, mirrors and decisions, served on a port: what a browser looks at."""

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from bdn.core.errors import Fact
from bdn.core.events import Event
from bdn.mirror.db.tables import ChunkSetRow, ManifestRow, MirrorRow, MirrorSourceRow
from bdn.net.api_server import bind_tcp, serving
from bdn.wire.event_schema import NodeEvent
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test

OPERATOR: Final = "the-operator-of-the-settings"
TB: Final = 1000**4
GB: Final = 1000**3
HOSTILE: Final[Mapping[str, str]] = {
    "script": "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">",
    "long": "l" * 4096,
    "right-to-left": "\u202egpj.exe \u05e9\u05dc\u05d5\u05dd",
}
MODELS: Final[Sequence[tuple[str, int, int]]] = (  # source, bytes, files
    ("hf://meta-llama/Llama-3.3-70B-Instruct@main", 141 * GB, 50),
    ("hf://Qwen/Qwen3-235B-A22B@main", 470 * GB, 129),
    ("hf://mistralai/Mixtral-8x22B-Instruct-v0.1@main", 281 * GB, 71),
    ("s3://research-datasets/fineweb-edu/2026-10", 2 * TB, 8192),
    ("bt://llama-sft@job-1841/checkpoint-2000", 137 * GB, 41),
)


def manifest_of(source: str) -> str:
    """The made-up digest of a source's manifest."""
    return sha256(source.encode()).hexdigest()


@dataclass
class PageWorld:
    mirror: MirrorUnderTest
    url: str
    tokens: dict[str, str] = field(default_factory=dict)  # by role, or role and team

    def agent(self, node: str, cluster: str = "iad-h200", **state: Any) -> FakeAgent:
        return FakeAgent(self.mirror, node, cluster, **state)

    async def add_token(self, name: str, role: str, **more: Any) -> str:
        body = {"name": name, "organisation": "default", "role": role, **more}
        answer = await self.mirror.http.post("/tokens", json=body)
        assert answer.status_code == 201, answer.text
        self.tokens[name] = answer.json()["token"]
        return self.tokens[name]

    async def add_mirror(
        self, uri: str, status: str, *, size: int = GB, files: int = 10, done: float = 1.0, **more: Any
    ) -> str:
        """The row of a mirror that was never at work, and its manifest if it is READY. ``done`` is a part of its bytes."""
        organisation, team = more.pop("organisation", "default"), more.pop("team", "")
        age, error = more.pop("age", 600.0), more.pop("error", None)
        now, is_ready, mirror_id = (
            self.mirror.service.requests.database.now(),
            status == "READY",
            f"mir_{secrets.token_hex(12)}",
        )
        has_ended, has_begun = status in ("READY", "FAILED", "CANCELED"), status != "PENDING"
        body = {"source": uri, "mount_location": "/models/m"}
        async with self.mirror.service.requests.database.write() as session:
            session.add(
                MirrorRow(
                    id=mirror_id,
                    organisation=organisation,
                    team=team,
                    request_key=mirror_id,
                    status=status,
                    created_at=now - age,
                    started_at=now - age / 2 if has_begun else None,
                    completed_at=now - age / 4 if has_ended else None,
                    error=error,
                    claimed_by="another worker" if status == "SYNCING" else None,
                    claim_expires_at=now + 86400 if status == "SYNCING" else None,
                )
            )
            await session.flush()
            session.add(
                MirrorSourceRow(
                    mirror_id=mirror_id,
                    organisation=organisation,
                    position=0,
                    request=body,
                    source=uri,
                    mount_location="/models/m",
                    status=status,
                    resolved_revision="a" * 40 if uri.startswith("hf://") else None,
                    manifest=manifest_of(uri) if is_ready else None,
                    files_total=files if has_begun else None,
                    bytes_total=size if has_begun else None,
                    bytes_transferred=round(size * done) if has_begun else 0,
                    warnings=[],
                    error=error,
                )
            )
            if is_ready and await session.get(ManifestRow, manifest_of(uri)) is None:
                chunks = ChunkSetRow(owner=f"manifest:{manifest_of(uri)}", state="published")
                session.add(chunks)
                await session.flush()
                row = {"digest": manifest_of(uri), "set_id": chunks.id, "files_total": files, "bytes_total": size}
                session.add(ManifestRow(**row, created_at=now, last_used=now))
        return mirror_id

    async def silence(self, node: str, seconds: float = 3600.0) -> None:
        """Date the last heartbeat of an agent back."""
        async with self.mirror.service.requests.database.write() as session:
            at = self.mirror.service.requests.database.now() - seconds
            connection = await session.connection()
            await connection.exec_driver_sql(f"UPDATE agents SET last_heartbeat = {at} WHERE node = '{node}'")


@asynccontextmanager
async def page_world(folder: Path, *, auth: str = "token", **settings: Any) -> AsyncIterator[PageWorld]:
    """An empty mirror that serves its page. No worker is at work, so mirrors stay as they are."""
    known = {"auth": auth, "token": OPERATOR, "bearer": OPERATOR} if auth == "token" else {}
    settings = {"work": False, **known, **settings}
    async with mirror_under_test(folder, **settings) as mirror:
        listener = bind_tcp("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with serving(mirror.service.api, listener, is_local=auth == "off"):
            yield PageWorld(mirror, url, {"operator": OPERATOR} if known else {})


def held(source: str, size: int, *, jobs: Sequence[str] = (), complete: bool = True) -> Json:
    """A ``Holding`` of this source's manifest."""
    return {"manifest": f"b3:{manifest_of(source)}", "bytes": size, "complete": complete, "sources": [source]} | {
        "held_by": list(jobs)
    }


def use(budget: int, part: float, *, pressed: int = 0, problem: str | None = None, leased: float = 0.1) -> Json:
    """A ``TierUse`` of which this part is held."""
    held_bytes = round(budget * part)
    return {"budget": budget, "committed": held_bytes, "reserved": 0, "leased": round(held_bytes * leased)} | {
        "pressed": pressed,
        "problem": problem,
    }


def stage(number: int, source: str, size: int, job: str, **more: Any) -> Json:
    """A ``StageReport`` of a stage at work."""
    report: Json = {
        "id": f"stg_{number:024x}",
        "job": job,
        "mirror_id": None,
        "manifests": [f"b3:{manifest_of(source)}"],
    }
    report |= {"state": "STAGING", "bytes_done": size * (number % 9 + 1) // 11, "bytes_total": size}
    return report | {"bytes_per_second": (3 + number % 5) * GB, "since": 1_795_000_000.0, "error": None, **more}


async def fill(world: PageWorld, nodes: int = 48) -> None:
    """A cluster on an ordinary day: most of it is right, and some of each kind is not."""
    for source, size, files in MODELS:
        await world.add_mirror(source, "READY", size=size, files=files, age=7200)
    await world.add_mirror("hf://deepseek-ai/DeepSeek-V3.1@main", "SYNCING", size=688 * GB, files=163, done=0.4)
    await world.add_mirror("gs://eval-sets/2026-11/mmlu-pro", "SYNCING", size=12 * GB, files=1200, done=0.9, age=90)
    await world.add_mirror("hf://google/gemma-3-27b-it@main", "PENDING", age=400)
    gated = {"code": "GATED_SOURCE", "message": "hf://google/gemma-3-27b-pt asks for its terms to be accepted"}
    await world.add_mirror(
        "hf://google/gemma-3-27b-pt@main", "FAILED", error=gated | {"retryable": False, "details": {}}
    )
    for number in range(nodes):
        await _beat(world, number)
    await world.silence("h200-017")


async def _beat(world: PageWorld, number: int) -> None:
    cluster = "iad-h200" if number % 4 else "fra-h100"
    source, size, _ = MODELS[number % len(MODELS)]
    jobs = [f"llama-sft/job-{1800 + number}"] if number % 3 else []
    state: Json = {
        "tiers": {
            "node": use(28 * TB, number * 37 % 100 / 100, pressed=3 * TB if number == 9 else 0),
            "cluster": use(3 * TB, number * 17 % 100 / 100),
        },
        "holdings": [held(source, size, jobs=jobs), held(MODELS[0][0], MODELS[0][1], complete=number % 5 > 0)],
        "unsynced_bytes": 41 * GB if number in (5, 17) else 0,
        "roles": ["node", "cluster", "job"],
        "stages": [stage(number, source, size, jobs[0])] if jobs and number % 2 else [],
    }
    await world.agent(f"{cluster[4:]}-{number:03}", cluster, **state).beat(
        events=[_admission(world, number, source, size)]
    )


def _admission(world: PageWorld, number: int, source: str, size: int) -> Json:
    facts: dict[str, Fact] = {
        "stage": f"stg_{number:024x}",
        "job": f"llama-sft/job-{1800 + number}",
        "bytes_total": size,
    }
    facts |= {"bytes_missing": size // 2, "budget": 28 * TB, "committed": 5 * TB, "reserved": 0}
    event = Event.of("admitted", facts, manifest=f"b3:{manifest_of(source)}", organisation="default")
    at = world.mirror.service.requests.database.now() - 60
    return NodeEvent.of(replace(event, id=f"made-up-{number}", at=at)).model_dump(mode="json")
