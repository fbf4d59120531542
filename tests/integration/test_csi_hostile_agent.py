"""The privileged driver with an agent that was taken over: whatever that answers, nothing but a view of its own is mounted."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from grpc import StatusCode

from bdn.disk.binding import mounts_below
from tests.doubles.hub import Hub
from tests.support.agent.csi_node import CsiNode, node_folder
from tests.support.agent.kubelet import OK, Answer
from tests.support.agent.mounts import needs_mounts
from tests.support.content.trees import tree
from tests.support.mirror.process import ServingProcess
from tests.support.network.egress import ALLOW_LOOPBACK

pytestmark = needs_mounts
Json = dict[str, Any]
STAGE: Final = "stg_0123456789abcdef01234567"
SECRET: Final = {"shadow": b"root's own"}


@asynccontextmanager
async def answering(socket: Path, stage: Callable[[str], Json]) -> AsyncIterator[None]:
    """An agent that has whatever stage is requested. ``stage`` makes its document for a job."""
    jobs: list[str] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = next((int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-l")), 0)
        if body := await reader.readexactly(size):
            jobs.append(json.loads(body)["job_id"])
        documents = [stage(job) for job in jobs[-1:]]
        is_list = head.startswith(("GET /stages ", "GET /stages?"))
        content = json.dumps({"items": documents[:0], "next_cursor": None} if is_list else documents[0]).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n")
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(content), content))
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(connected, socket):
        yield


def ready(stage_id: str, *paths: object) -> Callable[[str], Json]:
    mounts = [
        {"path": str(path), "mount_location": "/volume", "manifest": f"b3:{'0' * 64}", "source": "hf://org/model", "exposure": "none"}
        for path in paths
    ]  # fmt: skip
    common = {"id": stage_id, "state": "READY", "created_at": "2026-11-30T00:00:00Z", "mounts": mounts}
    return lambda job: {**common, "job_id": job}


def hostile(mounts: Path, secret: Path) -> dict[str, Callable[[str], Json]]:
    own = mounts / STAGE
    (own / "view").mkdir(parents=True)
    (own / "link").symlink_to(secret)
    (own / "file").write_bytes(b"")
    os.mkfifo(own / "pipe")
    return {
        "another directory": ready(STAGE, secret),
        "the root directory": ready("/", "/"),
        "up and away": ready(STAGE, f"{own}/../../../../secret"),
        "an id that leads up": ready("..", f"{mounts}/../../../secret"),
        "a link": ready(STAGE, own / "link"),
        "below a link": ready(STAGE, own / "link/."),
        "a file": ready(STAGE, own / "file"),
        "a pipe": ready(STAGE, own / "pipe"),
        "nothing there": ready(STAGE, own / "none"),
        "no mount": ready(STAGE),
        "two mounts": ready(STAGE, own / "view", secret),
        "a NUL": ready(STAGE, f"{own}/view\0"),
        "a long path": ready(STAGE, f"{own}/{'a/' * 5_000}"),
    }


async def test_driver__whose_agent_was_taken_over__mounts_nothing_but_a_view_of_the_stage(tmp_path: Path) -> None:
    with Hub() as hub, node_folder() as root:
        hub.repo("org/model").commit({"config.json": b"{}"})
        given = {"HF_ENDPOINT": hub.url, "BDN_EGRESS_ALLOW": ALLOW_LOOPBACK}
        (root / "secret").mkdir()
        (root / "secret/shadow").write_bytes(SECRET["shadow"])
        mounts = root / "agent/cache/mounts"
        async with await ServingProcess.start(tmp_path / "mirror", **given) as mirror:
            node, answers = CsiNode(root, mirror.url), dict[str, Answer]()
            async with node.driver() as driver:
                for name, stage in hostile(mounts, root / "secret").items():
                    async with answering(root / "agent/agent.sock", stage):
                        answers[name] = await (pod := node.pod()).publish({"source": "hf://org/model"}, 10.0)
                    assert mounts_below(root) == [], name
                    assert not pod.target.exists() or tree(pod.target) == {}, name
                (mounts / STAGE / "view/config.json").write_bytes(b"{}")
                async with answering(root / "agent/agent.sock", ready(STAGE, mounts / STAGE / "view")):
                    assert await (pod := node.pod()).publish({"source": "hf://org/model"}) == OK, node.log
                    assert tree(pod.target) == {"config.json": b"{}"}
                assert driver.returncode is None
    assert {name: answer.text[:12] for name, answer in answers.items()} == dict.fromkeys(answers, "MOUNT_FAILED")
    assert {answer.status for answer in answers.values()} == {StatusCode.FAILED_PRECONDITION}
