"""Recorded requests of truss 0.18.36, replayed: each has its recorded status, and its answer at least the recorded keys.

The recordings are one session of one user, in the order of ``ORDER``; what they name is mapped to what this mirror answered for it. Each call has a row in
``REPLAYED`` or in ``LEFT_OUT``. No worker runs: jobs stay as they are created.
"""

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest

from bdn.mirror.db.secrets import new_key
from bdn.mirror.db.tables import TrainingJobRow
from bdn.wire.cache_schema import FileSummary, pack
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.job import Job
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test
from tests.support.mirror.training_jobs import gpus

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
    "GET /v1/blobs/credentials/train",
    "PUT /uploads/uploads/{}",
    "POST /v1/training_projects/{}/jobs",
    "GET /v1/training_projects/{}/jobs/{}",
    "PATCH /v1/training_projects/{}/jobs/{}",
    "POST /v1/training_jobs/search",
    "POST /v1/training_projects/{}/jobs/{}/logs",
    "POST /v1/training_projects/{}/jobs/{}/stop",
    "POST /v1/training_projects/{}/jobs/{}/recreate",
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
    "GET /v1/training_projects/{}/jobs/{}/download",
    "GET /files/b3:1/archive.tgz",
}
LEFT_OUT: Final = {
    "POST /uploads/uploads/{}": "tests of uploads send parts with the real boto3; here the object is put at once",
}
# What this mirror refuses, with its status.
REFUSED: Final = {
    "PATCH /v1/training_projects/{}/jobs/{}/interactive_session": 400,
    "POST /v1/api_keys": 400,
}
# Lists that the recording has something in, and this mirror does not.
EMPTY: Final = {"answer.logs"}
_ID: Final = re.compile(r"h100-1|up_id[0-9]{8}\.tgz|(?<![0-9A-Za-z_])(?:id[0-9]{8}|team[0-9]{6})\b")
_FRESH: Final = re.compile(r"SESSION-TOKEN|http://127\.0\.0\.1.*")  # another one in each answer
_NAMES: Final = ("gpuType", "name", "checkpoint_id", "relative_file_name", "node_id", "path")
SETTINGS: Final[Json] = {"secrets_key": new_key(), "issuer_url": "https://bdn.example"}
VALID: Final = {  # names that no cloud would give, and what stands for them
    "arn:aws:iam::1:role/r": "arn:aws:iam::123456789012:role/r",
    "workloadIdentityPools/p/providers/q": "workloadIdentityPools/pool/providers/provider",
    "a@b.iam": "account@project.iam",
}

HEADER: Final = json.dumps(
    {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
)
FILE: Final = len(HEADER).to_bytes(8, "little") + HEADER.encode() + bytes(16)
CHECKPOINTS: Final[dict[str, Json]] = {
    "checkpoint-24": {"checkpoint_type": "full"},
    "checkpoint-48": {"checkpoint_type": "lora", "base_model": "Qwen/Qwen3-0.6B", "lora_adapter_config": {"r": 8}},
}
VOLUME: Final = "0" * 32
ENTRY: Final = {"modified": "2026-11-28T05:00:00Z", "file_type": "file", "permissions": "-rw-r--r--", "size_bytes": 7}


@dataclass
class Session:
    """The recorded user at this mirror. ``ours`` has ids, keys and addresses by their recorded ones."""

    mirror: MirrorUnderTest
    user: Job
    ours: dict[str, str] = field(default_factory=dict)
    replayed: Counter[str] = field(default_factory=Counter)

    def mapped(self, text: str) -> str:
        if text in self.ours:
            return self.ours[text]
        text = _ID.sub(lambda found: self.ours.get(found[0], found[0]), text)
        return reduce(lambda so_far, names: so_far.replace(*names), VALID.items(), text)

    async def play(self, exchange: Json) -> None:
        call = call_of(exchange)
        assert call in REPLAYED or call in LEFT_OUT, call
        if call not in REPLAYED:
            if exchange["target"].endswith("?uploads"):
                await self.put(exchange["target"], 1)
            return
        self.replayed[call] += 1
        if call.startswith("PUT /uploads"):
            if "uploadId" not in exchange["target"]:
                await self.put(exchange["target"], int(re.sub("[^0-9]", "", exchange["body"])))
            return
        body = exchange["body"]
        if call == "POST /v1/training_projects/{}/jobs":
            body = await self.without_what_is_refused(exchange["target"], body)
        if call == "PATCH /v1/training_projects/{}/jobs/{}" and exchange["status"] == 200:
            await self.wait_for_nodes(exchange["target"].rpartition("/")[2])
        if call == "POST /v1/training_projects/{}/jobs/{}/metrics":
            await self.use_scratch(exchange["target"].split("/")[-2])
        answer = await self.send(exchange["method"], exchange["target"], body, exchange["headers"])
        assert answer.status_code == REFUSED.get(call, exchange["status"]), answer.text
        if call in REFUSED:
            assert answer.json().keys() == {"code", "message", "error"}
            assert answer.json()["code"] == answer.json()["error"]["code"] == "NOT_SUPPORTED"
        elif isinstance(exchange["answer"], dict):
            self.compare("answer", exchange["answer"], json.loads(answer.content))
            await self.set_up(answer)

    async def send(self, method: str, target: str, body: Any, headers: Json) -> httpx2.Response:
        return await self.mirror.http.request(
            method,
            re.sub(r"^https?://[^/]+", "", self.mapped(target)),
            json=None if body is None else json.loads(self.mapped(json.dumps(body))),
            headers={name: value for name, value in headers.items() if name in ("authorization", "range")},
        )

    async def put(self, target: str, size: int) -> None:
        """The object of an upload."""
        path = re.sub(r"^https?://[^/]+", "", self.mapped(target.partition("?")[0]))
        token = {"X-Amz-Security-Token": self.ours["SESSION-TOKEN"]}
        answer = await self.mirror.http.put(path, content=bytes(size), headers=token)
        assert answer.status_code == 200, answer.text

    async def without_what_is_refused(self, target: str, body: Json) -> Json:
        """The request of a job without the checkpoints of Loops, for which it is refused."""
        loading = body["training_job"]["runtime"].get("load_checkpoint_config") or {"checkpoints": []}
        kept = [one for one in loading["checkpoints"] if one["typ"] != "loops_checkpoint"]
        if len(kept) < len(loading["checkpoints"]):
            assert (await self.send("POST", target, body, {})).status_code == 400
            loading["checkpoints"] = kept
        return body

    async def wait_for_nodes(self, recorded: str) -> None:
        async with self.mirror.service.requests.database.write() as session:
            (await session.get_one(TrainingJobRow, self.ours[recorded])).status = "PENDING"

    async def use_scratch(self, recorded: str) -> None:
        """Each rank of the job has reported what it used last."""
        async with self.mirror.service.requests.database.write() as session:
            used = {"scratch_bytes": 10**6, "scratch_limit_bytes": 10**7, "reported_at": 1_800_000_000.0}
            row = await session.get_one(TrainingJobRow, self.ours[recorded])
            row.ranks = [{"node": f"n{rank}", "state": "ENDED", "gpus": 0, **used} for rank in range(2)]

    def compare(self, place: str, recorded: Any, came: Any) -> None:
        """Assert that the answer has each recorded key, and map recorded ids and addresses to the answer's."""
        if isinstance(recorded, dict):
            assert came is not None, place
            assert recorded.keys() <= came.keys(), (place, recorded.keys() - came.keys())
            for key, value in recorded.items():
                self.compare(f"{place}.{key}", value, came[key])
        elif isinstance(recorded, list) and recorded:
            assert came or place in EMPTY, f"{place} is empty"
            for one, other in self.pairs(recorded, came):
                self.compare(f"{place}[]", one, other)
        elif isinstance(recorded, str) and _ID.fullmatch(recorded):
            assert self.ours.setdefault(recorded, came) == came, place
        elif isinstance(recorded, str) and _FRESH.fullmatch(recorded):
            self.ours[recorded] = came

    def pairs(self, recorded: list[Any], came: list[Any]) -> Iterator[tuple[Any, Any]]:
        """The items of one id, or of one name: the order of some lists is another one here."""
        for one in recorded:
            key = next((key for key in _NAMES if isinstance(one, dict) and key in one), None)
            known = self.ours.get(one.get("id", "")) if isinstance(one, dict) else None
            for other in came:
                if key is None or (other["id"] == known if known else one[key] == other[key]):
                    yield one, other
                    break

    async def set_up(self, answer: httpx2.Response) -> None:
        """What a new project or job of the recording has: a cache with two files, or two checkpoints."""
        document, path = answer.json(), answer.request.url.path
        if path.endswith("/training_projects"):
            for project in filter(None, [document.get("training_project")]):
                cache = {"project": project["id"], "cluster": "c", "volume_id": VOLUME}
                assert (await self.mirror.http.post("/caches", json=cache)).status_code == 201
                packed = pack([file_summary("user_artifacts"), file_summary("user_artifacts/tokens.bin")])
                sums = {"volume_id": VOLUME, "timestamp": "2026-11-28T05:00:00Z", "size_bytes": 7, "files": 2}
                at = f"/caches/{project['id']}/c/summary"
                assert (await self.mirror.http.put(at, json={**sums, "packed": packed})).status_code == 200
        if path.endswith(("/jobs", "/recreate")):
            job = document["training_job"]
            for name, details in CHECKPOINTS.items():
                where = f"bt://{job['training_project_id']}@{job['id']}/{name}"
                await self.user.push({"model.safetensors": FILE}, where, **details)


def file_summary(path: str) -> Any:
    return FileSummary.model_validate({**ENTRY, "path": path})


def call_of(exchange: Json) -> str:
    """Such as ``GET /v1/training_projects/{}``."""
    path = re.sub(r"^https?://[^/]+", "", exchange["target"]).partition("?")[0]
    return f"{exchange['method']} {_ID.sub('{}', path)}"


@pytest.fixture
async def session(tmp_path: Path) -> AsyncIterator[Session]:
    async with mirror_under_test(tmp_path / "mirror", serve=True, work=False, **SETTINGS) as mirror:
        await FakeAgent(mirror, "n1", roles=["node", "job"], capacity=gpus(1, "H100")).beat()
        for name in ("aws_access_key_id", "hf_access_token"):
            assert (await mirror.http.put(f"/secrets/{name}", json={"value": "x"})).status_code == 200
        user = Job(mirror)
        async with user.plane:
            yield Session(mirror, user)


async def test_recorded_requests__have_the_recorded_status_and_keys(session: Session) -> None:
    assert ORDER.index("24-deploy-checkpoints-by-job") + 1 == ORDER.index(FIRST)
    for name in ORDER:
        for number, exchange in enumerate(RECORDINGS[name]["exchanges"]):
            try:
                await session.play(exchange)
            except (AssertionError, KeyError) as error:
                raise AssertionError(f"{name}, exchange {number}, {call_of(exchange)}") from error
    assert session.replayed.keys() == REPLAYED
