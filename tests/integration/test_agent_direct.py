"""Stages take their chunks straight from the bucket of the mirror's store, and from the mirror what that does not give."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from bdn.wire.stage_schema import StageDocument
from node_agent.app import Agent
from tests.doubles.faults import flip_byte, right_after
from tests.doubles.s3 import S3Server
from tests.support.agent.bucket import AgentBucket
from tests.support.agent.mirror import AgentMirror, fresh_mirror, in_both_forms
from tests.support.agent.rig import Rig, metrics, staged
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror
_NUMBERS = count()

FILES = {
    "large.safetensors": noise(17 * MIB + 3, 1),
    "one.bin": noise(2 * MIB, 2),
    **{f"small/{number}": noise(30_000 + number, 100 + number) for number in range(20)},
}
SIZE = sum(map(len, FILES.values()))
PAGE = 1  # of the manifest, which is a chunk like any other


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def bucket(mirror: AgentMirror, s3: S3Server) -> AgentBucket:
    """The bucket of the test's mirror, empty."""
    s3.log.clear()
    s3.script.clear()
    mirror.bucket = AgentBucket(s3, s3.bucket(f"store-{next(_NUMBERS)}"))
    return mirror.bucket


def figures(*agents: Agent) -> dict[str, float]:
    """Bytes of origins by delivery, and chunks that the mirror was asked for instead, by reason; of all agents together."""
    found: dict[str, float] = {}
    for agent in agents:
        for name, value in metrics(agent.metrics.render({}).decode()).items():
            for kind in ("bdn_agent_origin_bytes_total", "bdn_agent_proxied_chunks_total"):
                if name.startswith(kind) and value:
                    label = name.split('"')[1]
                    found[label] = found.get(label, 0) + value
    return found


def check(document: StageDocument) -> None:
    assert tree(Path(document.mounts[0].path)) == FILES
    assert document.mounts[0].bytes_from.mirror == SIZE


@in_both_forms
async def test_a_stage_takes_all_from_the_bucket_and_nothing_through_the_mirror(
    rig: Rig, mirror: AgentMirror, bucket: AgentBucket, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever time it is on the node; and of the addresses nobody hears."""
    caplog.set_level(logging.DEBUG)
    manifest = mirror.publish(FILES)
    grant = mirror.grant(manifest, expires_in=7 * 86400)
    async with rig.agent(clock=lambda: time.time() + 2 * 86400) as agent:
        stage = await agent.stages.start("job", grant)
        async with asyncio.timeout(60):
            check(await agent.stages.finish(stage.record.id))

        chunks = mirror.chunks_of[manifest.digest]
        assert mirror.requests == 0
        assert figures(agent) == {"direct": bucket.server.log.bytes_served("/b3/")}
        assert len(bucket.server.log.find("/b3/")) == PAGE + len(chunks)
        assert bucket.asked == [PAGE, len(chunks)]
        assert not any("authorization" in request.headers for request in bucket.server.log.find())
    assert "X-Amz" not in caplog.text


@pytest.mark.promise("corruption")
async def test_what_the_bucket_lacks_or_has_wrong_comes_from_the_mirror_which_hears_of_it(
    rig: Rig, mirror: AgentMirror, bucket: AgentBucket
) -> None:
    manifest = mirror.publish(FILES)
    lost, wrong, *_ = mirror.chunks(manifest, "large.safetensors")
    bucket.drop(lost)
    bucket.server.fail(flip_byte(5), wrong.fanout)
    async with rig.agent() as agent:
        check(await staged(agent, mirror, manifest))
        assert dict(mirror.chunk_requests) == {lost: 1, wrong: 1}
        assert set(mirror.suspected) == {lost, wrong}
        assert figures(agent)["absent"] == 1


@pytest.mark.promise("network")
async def test_a_stage_goes_on_without_its_mirror_while_its_addresses_are_good(
    rig: Rig, mirror: AgentMirror, bucket: AgentBucket
) -> None:
    manifest = mirror.publish(FILES)
    go, entered, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()

    def hold() -> None:
        loop.call_soon_threadsafe(entered.set)
        assert go.wait(60)

    bucket.server.fail(right_after(hold), "/b3/", times=None, skip=PAGE)
    async with rig.agent(byte_threads=1) as agent:
        stage = await agent.stages.start("job", mirror.grant(manifest))
        async with asyncio.timeout(60):
            await entered.wait()
            mirror.down = True
            go.set()
            check(await agent.stages.finish(stage.record.id))
        assert figures(agent).keys() == {"direct"}
