"""Bytes that have come and do not count yet: who watches a mirror or a stage sees them move, and they are counted once."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest
from bdn.mirror.db.waiting import SharedReads
from bdn.wire.mirror_schema import Mirror
from bdn.wire.stage_schema import StageDocument, StageMount
from tests.doubles.faults import answer, cut
from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.hub import Hub
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig
from tests.support.content.noise import MIB, noise
from tests.support.mirror.service import LONGEST_SECONDS, MirrorUnderTest, mirror_under_test, source, until

pytest_plugins = ("tests.support.mirror.fixtures",)

ORGANISATION = "default"
PART = 300_000
CONTENT = noise(2 * MIB)  # one chunk
HALF = len(CONTENT) // 2  # enough for a reader of plain HTTP to wake up at once: it sleeps until 512 KiB have come
MODEL = source("hf://org/model")


class Pauses:
    """Each pause before the upstream is asked again lasts until the test ends it."""

    def __init__(self) -> None:
        self.begun, self.end = asyncio.Event(), asyncio.Event()

    async def __call__(self, _: float) -> None:
        self.begun.set()
        await self.end.wait()


async def first(updates: AsyncIterator[Any], is_it: Any) -> Any:
    """The first update of which that holds."""
    async with asyncio.timeout(LONGEST_SECONDS):
        async for update in updates:
            if is_it(update):
                return update
    raise AssertionError("it ended before")


async def test_of_a_mirror_the_bytes_of_a_chunk_are_seen_before_it_is_whole_and_go_back_when_they_are_lost(
    upstreams: None, hub: Hub, tmp_path: Path
) -> None:
    hub.repo("org/model").commit({"model.safetensors": CONTENT})
    hub.fail(cut(HALF), origin="cdn")
    hub.fail(answer(503), origin="cdn")  # to the request for the rest
    pauses = Pauses()
    async with mirror_under_test(tmp_path, pause=pauses) as mirror:
        begun = await mirror.begin(MODEL)
        follow = partial(mirror.service.requests.follow, begun["id"], ORGANISATION, 0.01)
        seen: list[Mirror] = []

        async def watch() -> None:
            async for update in follow():
                seen.append(update)

        watching = asyncio.create_task(watch())
        here = await first(follow(), lambda update: update.bytes_total and update.bytes_under_way)
        assert 0 < here.bytes_under_way == here.sources[0].bytes_under_way <= HALF
        assert here.bytes_transferred == 0

        hub.release_stalled()
        await pauses.begun.wait()
        lost = await mirror.get(f"/mirror/{begun['id']}")
        assert (lost["bytes_under_way"], lost["bytes_transferred"]) == (0, 0)

        pauses.end.set()
        done = await mirror.ended(begun["id"])
        await watching
    assert (done["status"], done["bytes_transferred"], done["bytes_under_way"]) == ("READY", len(CONTENT), 0)
    assert hub.log.count(origin="cdn") == 3
    assert all(update.bytes_transferred + update.bytes_under_way <= len(CONTENT) for update in seen)
    assert seen[-1].bytes_transferred == len(CONTENT)


async def test_bytes_under_way_are_seen_without_another_look_at_the_database(mirror: MirrorUnderTest, hub: Hub) -> None:
    hub.repo("org/model").commit({"model.safetensors": CONTENT})
    gate = threading.Event()
    hub.fail(replace(cut(HALF), before=gate.wait), origin="cdn")
    begun = await mirror.begin(MODEL)
    await until(lambda: hub.log.count(origin="cdn"))
    requests = replace(mirror.service.requests, watched=SharedReads(math.inf))  # what was read once is never too old
    updates = requests.follow(begun["id"], ORGANISATION, 0.01)
    before = await anext(updates)
    assert (before.status, before.bytes_under_way) == ("SYNCING", 0)
    gate.set()
    await first(updates, lambda update: update.bytes_under_way)
    hub.release_stalled()
    assert (await mirror.ended(begun["id"]))["bytes_transferred"] == len(CONTENT)


async def test_a_process_that_does_not_do_the_work_knows_of_none(
    upstreams: None, postgres_url: str, hub: Hub, tmp_path: Path
) -> None:
    hub.repo("org/model").commit({"model.safetensors": CONTENT})
    hub.fail(cut(HALF), origin="cdn")
    beside = partial(mirror_under_test, database_url=postgres_url, store=f"file://{tmp_path}/store")
    async with beside(tmp_path / "a") as worker, beside(tmp_path / "b", work=False) as other:
        begun = await worker.begin(MODEL)
        updates = worker.service.requests.follow(begun["id"], ORGANISATION, 0.01)
        await first(updates, lambda update: update.bytes_under_way)
        document = await other.get(f"/mirror/{begun['id']}")
        assert (document["status"], document["bytes_under_way"]) == ("SYNCING", 0)
        hub.release_stalled()
        assert (await other.ended(begun["id"]))["bytes_transferred"] == len(CONTENT)


@pytest.fixture
def agents_mirror() -> Iterator[AgentMirror]:
    with AgentMirror(is_packed=True).running() as mirror:
        yield mirror


@pytest.mark.parametrize("files", [
    {"one chunk": CONTENT},
    {"three chunks": noise(17 * MIB + 3, 1)},
    {f"{number} of a slab": noise(100_000 + number, number) for number in range(5)},
], ids=["a chunk", "chunks", "a slab"])  # fmt: skip
async def test_of_a_stage_the_bytes_of_a_chunk_are_seen_before_it_is_whole_and_counted_once(
    agents_mirror: AgentMirror, tmp_path: Path, files: dict[str, bytes]
) -> None:
    total = sum(map(len, files.values()))
    manifest = agents_mirror.publish(files)

    def respond(request: Request) -> Answer:
        with agents_mirror.store.open(Digest.parse(request.url.path.rpartition("/")[2])) as file:
            return Answer(200, content=file.read(), ranged=True)

    (chunk, *_) = agents_mirror.chunks(manifest, next(iter(files)))
    with Origin("chunks", respond) as chunks:
        chunks.fail(cut(PART), str(chunk).removeprefix("b3:"))
        agents_mirror.data_port = urlsplit(chunks.url).port
        async with Rig(agents_mirror, tmp_path).agent() as agent:
            begun = await agent.stages.start("job", agents_mirror.grant(manifest))
            follow = partial(agent.stages.follow, begun.record.id, 0.01)
            seen: list[StageMount] = []

            async def watch() -> None:
                async for update in follow():
                    seen.extend(update.mounts)

            watching = asyncio.create_task(watch())
            of_others = total - min(total, CHUNK_SIZE)

            def is_held(update: StageDocument) -> bool:
                (mount,) = update.mounts
                at = update.transfer and update.transfer.chunks_at
                return (mount.bytes_under_way, mount.bytes_done, at) == (PART, of_others, {"mirror": 1})

            await first(follow(), is_held)
            chunks.go_on.set()
            (mount,) = (await agent.stages.finish(begun.record.id)).mounts
            await watching
        asked = [request.headers.get("range") for request in chunks.log.find(str(chunk).removeprefix("b3:"))]
    assert (mount.bytes_done, mount.bytes_under_way, mount.bytes_from.mirror) == (total, 0, total)
    assert [asked[0], str(asked[1]).partition("-")[0]] == [None, f"bytes={PART}"]
    assert all(one.bytes_done + one.bytes_under_way <= total for one in seen)
    shown = [one.bytes_done + one.bytes_under_way for one in seen]
    assert shown == sorted(shown)


async def test_a_stage_that_is_stuck_says_what_its_chunks_wait_for(agents_mirror: AgentMirror, tmp_path: Path) -> None:
    manifest = agents_mirror.publish({"three chunks": noise(17 * MIB + 3, 1)})

    def respond(request: Request) -> Answer:
        with agents_mirror.store.open(Digest.parse(request.url.path.rpartition("/")[2])) as file:
            return Answer(200, content=file.read(), ranged=True)

    with Origin("chunks", respond) as chunks:
        chunks.fail(cut(PART), "|".join(one.hex for one in agents_mirror.chunks(manifest, "three chunks")))
        agents_mirror.data_port = urlsplit(chunks.url).port
        async with Rig(agents_mirror, tmp_path, {"byte_threads": 1}).agent() as agent:
            begun = await agent.stages.start("job", agents_mirror.grant(manifest))

            def is_stuck(update: StageDocument) -> bool:
                return update.transfer is not None and update.transfer.chunks_at == {"mirror": 1, "order": 1}

            await first(agent.stages.follow(begun.record.id, 0.01), is_stuck)
            chunks.go_on.set()
            done = await agent.stages.finish(begun.record.id)
    assert (done.state, done.transfer and done.transfer.chunks_at) == ("READY", {})
