"""Recorded requests of truss 0.18.36, replayed: each has its recorded status, and its answer at least the recorded keys.

The recordings are one session of one user, in the order of ``ORDER``; what they name is mapped to what this mirror answered for it. A call
is replayed if ``REPLAYED`` has its row. What other calls made in the recording is set up instead: to replay these as well, add their rows.
"""

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from bdn.mirror.db.secrets import new_key
from bdn.wire.cache_schema import pack
from tests.support.mirror.fake_training import FakeTraining, node, with_training
from tests.support.mirror.job import Job
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test

pytest_plugins = ("tests.support.mirror.fixtures",)

RECORDINGS: Final = {
    path.stem: json.loads(path.read_text()) for path in Path(__file__).parent.glob("recordings/*.json")
}
FIRST: Final = "01-push-full"  # was recorded after 24
ORDER: Final = sorted(RECORDINGS, key=lambda name: "24-then" if name == FIRST else name)

REPLAYED: Final = {
    "GET /v1/training_projects",
    "POST /v1/training_projects",
    "POST /v1/teams/{}/training_projects",
    "GET /v1/training_projects/{}/cache/summary",
    "GET /v1/training_projects/{}/jobs/{}/checkpoints",
    "GET /v1/training_projects/{}/jobs/{}/checkpoint_files",
    "POST /v1/training_projects/{}/jobs/{}/metrics",
    "GET /v1/training_projects/{}/jobs/{}/auth_codes",
    "PATCH /v1/training_projects/{}/jobs/{}/interactive_session",
    "GET /v1/training/capacity",
    "GET /v1/teams/{}/secrets",
    "POST /v1/teams/{}/secrets",
    "POST /v1/api_keys",
    "POST /graphql/",
    "GET /files/b3:0/checkpoint-24/model.safetensors",
}
# What this mirror refuses, with its status.
REFUSED: Final = {
    "PATCH /v1/training_projects/{}/jobs/{}/interactive_session": 400,
    "POST /v1/api_keys": 400,
}
# Lists that the recording has something in, and this mirror does not.
EMPTY: Final = {
    "answer.per_node_metrics[].metrics.ephemeral_storage.usage_bytes",
    "answer.per_node_metrics[].metrics.ephemeral_storage.utilization",
}
_ID: Final = re.compile(r"\b(?:id[0-9]{8}|team[0-9]{6})\b")
_NAMES: Final = ("name", "checkpoint_id", "relative_file_name", "node_id", "path", "gpuType")

HEADER: Final = json.dumps(
    {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
)
FILE: Final = len(HEADER).to_bytes(8, "little") + HEADER.encode() + bytes(16)
VOLUME: Final = "0" * 32
ENTRY: Final = {"modified": "2026-11-28T05:00:00Z", "file_type": "file", "permissions": "-rw-r--r--", "size_bytes": 7}


@dataclass
class Session:
    """The recorded user at this mirror. ``ours`` has ids and addresses of files by their recorded ones."""

    mirror: MirrorUnderTest
    training: FakeTraining
    user: Job
    ours: dict[str, str] = field(default_factory=dict)
    replayed: Counter[str] = field(default_factory=Counter)

    def mapped(self, text: str) -> str:
        return self.ours.get(text) or _ID.sub(lambda found: self.ours.get(found[0], found[0]), text)

    async def play(self, exchange: Json) -> None:
        target = self.mapped(exchange["target"])
        call = call_of(exchange)
        if call not in REPLAYED:
            await self.set_up(exchange["answer"])
            return
        body, answers_json = exchange["body"], isinstance(exchange["answer"], dict)
        headers = {name: value for name, value in exchange["headers"].items() if name in ("authorization", "range")}
        answer = await self.mirror.http.request(
            exchange["method"],
            re.sub(r"^https?://[^/]+", "", target),
            json=None if body is None else json.loads(self.mapped(json.dumps(body))),
            headers=headers,
        )
        self.replayed[call] += 1
        assert answer.status_code == REFUSED.get(call, exchange["status"]), answer.text
        if answers_json and call in REFUSED:
            assert set(answer.json()) == {"code", "message", "error"}
            assert answer.json()["code"] == answer.json()["error"]["code"] == "NOT_SUPPORTED"
        elif answers_json:
            document = answer.json() if exchange["status"] == 200 else json.loads(answer.content)
            self.compare("answer", exchange["answer"], document)
            await self.set_up_projects(document)

    def compare(self, place: str, recorded: Any, came: Any) -> None:
        """Each recorded key is there; ids and addresses of the answer are those of the recorded ones from now on."""
        if isinstance(recorded, dict) and came is not None:
            assert recorded.keys() <= came.keys(), (place, recorded.keys() - came.keys())
            for key, value in recorded.items():
                self.compare(f"{place}.{key}", value, came[key])
        elif isinstance(recorded, list) and recorded:
            assert came or place in EMPTY, f"{place} is empty"
            for one, other in self.pairs(recorded, came):
                self.compare(f"{place}[]", one, other)
        elif isinstance(recorded, str) and _ID.fullmatch(recorded):
            assert self.ours.setdefault(recorded, came) == came, place
        elif isinstance(recorded, str) and recorded.startswith("http://127.0.0.1"):
            self.ours[recorded] = came  # signed anew each time

    def pairs(self, recorded: list[Any], came: list[Any]) -> Iterator[tuple[Any, Any]]:
        """The items of one name: the order of some lists is another one here."""
        for one in recorded:
            key = next((key for key in _NAMES if isinstance(one, dict) and key in one), None)
            for other in came:
                if key is None or one[key] == other[key]:
                    yield one, other
                    break

    # --- what the calls that are not replayed made ---

    async def set_up(self, answer: Any) -> None:
        """The jobs of a recorded answer, each with the checkpoints that the recording has of all jobs."""
        documents = [answer.get("training_job"), *answer.get("training_jobs", [])] if isinstance(answer, dict) else []
        for job in filter(None, documents):
            fields = {**job, "checkpoint_sync_status": "COMPLETED"}
            for name in ("id", "training_project_id"):
                fields[name] = self.ours.get(job[name], job[name])
            project = {"id": fields["training_project_id"], "name": job["training_project"]["name"]}
            is_known = any(one.id == job["id"] for one in self.training.jobs)
            self.training.add(project, fields.pop("id"), **fields | {"training_project": project})
            if not is_known:
                for name, kind in (("checkpoint-24", "full"), ("checkpoint-48", "lora")):
                    tree = {"model.safetensors": FILE}
                    where = f"bt://{project['id']}@{job['id']}/{name}"
                    await self.user.push(tree, where, checkpoint_type=kind, base_model="Qwen/Qwen3-0.6B")

    async def set_up_projects(self, answer: Json) -> None:
        """A project that was just made gets a cache with two files."""
        if project := answer.get("training_project"):
            cache = {"project": project["id"], "cluster": "c", "volume_id": VOLUME}
            assert (await self.mirror.http.post("/caches", json=cache)).status_code == 201
            packed = pack([file_summary("user_artifacts"), file_summary("user_artifacts/tokens.bin")])
            sums = {"volume_id": VOLUME, "timestamp": "2026-11-28T05:00:00Z", "size_bytes": 7, "files": 2}
            path = f"/caches/{project['id']}/c/summary"
            assert (await self.mirror.http.put(path, json={**sums, "packed": packed})).status_code == 200


def file_summary(path: str) -> Any:
    from bdn.wire.cache_schema import FileSummary

    return FileSummary.model_validate({**ENTRY, "path": path})


def call_of(exchange: Json) -> str:
    """Such as ``GET /v1/training_projects/{}``."""
    path = re.sub(r"^https?://[^/]+", "", exchange["target"]).partition("?")[0]
    return f"{exchange['method']} {_ID.sub('{}', path)}"


@pytest.fixture
async def session(tmp_path: Path) -> AsyncIterator[Session]:
    async with mirror_under_test(tmp_path / "mirror", serve=True, secrets_key=new_key()) as mirror:
        training = with_training(mirror)
        training.nodes.append(node("H100", 1))
        for name in ("aws_access_key_id", "hf_access_token"):
            assert (await mirror.http.put(f"/secrets/{name}", json={"value": "x"})).status_code == 200
        user = Job(mirror)
        async with user.plane:
            yield Session(mirror, training, user)


async def test_recorded_requests__have_the_recorded_status_and_keys(session: Session) -> None:
    assert ORDER.index("24-deploy-checkpoints-by-job") + 1 == ORDER.index(FIRST)
    for name in ORDER:
        for number, exchange in enumerate(RECORDINGS[name]["exchanges"]):
            try:
                await session.play(exchange)
            except AssertionError as error:
                raise AssertionError(f"{name}, exchange {number}, {call_of(exchange)}") from error
    assert session.replayed.keys() == REPLAYED
