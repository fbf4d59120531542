"""The real ``bdn serve``: killed in the middle of copies, or ended."""

import re
import signal
from collections import Counter
from pathlib import Path
from random import Random

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.manifest import Root, files_of
from bdn.mirror.db.identities import NOT_YET, RAW
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.mirror.process import ServingProcess
from tests.support.mirror.service import source, until

pytest_plugins = ("tests.support.mirror.fixtures",)
CHUNKS = 24
LARGE = GeneratedContent((CHUNKS - 1) * CHUNK_SIZE + 12345)
MODEL = source("hf://org/model")
TRANSFERS = 3
KILLS = 5


def chunks_asked_for(hub: Hub) -> list[int]:
    """Which chunks of the large file were asked for, in order."""
    starts = [re.fullmatch(r"bytes=(\d+)-\d+", request.headers["range"]) for request in hub.log.find(origin="cdn")]
    return [int(match[1]) // CHUNK_SIZE for match in starts if match]


def recorded(mirror: ServingProcess) -> set[int]:
    """The chunks of the large file that the next worker will find."""
    found = mirror.query(f"SELECT chunks FROM identities WHERE size > {CHUNK_SIZE}")
    pieces = [raw[at : at + RAW] for (raw,) in found for at in range(0, len(raw), RAW)]
    return {index for index, piece in enumerate(pieces) if piece != NOT_YET}


async def test_a_mirror_killed_again_and_again_reads_little_twice(upstreams: None, hub: Hub, tmp_path: Path) -> None:
    hub.repo("org/model").commit({"model.safetensors": LARGE, "config.json": b"{}"})
    random, asked, mirror_id = Random(20261120), Counter[int](), ""
    before: set[int] = set()
    for life in range(KILLS):
        hub.log.clear()
        async with await ServingProcess.start(tmp_path, BDN_TRANSFERS=str(TRANSFERS)) as mirror:
            if life == 0:
                # The first one certainly dies with a part recorded, a part in flight, and a part to come.
                hub.fail(stall(), origin="cdn", skip=4, times=TRANSFERS)
                mirror_id = await mirror.begin(MODEL)
                await until(lambda: len(chunks_asked_for(hub)) == 4 + TRANSFERS and len(recorded(mirror)) == 4)
            else:
                count = random.randint(1, (CHUNKS - len(before)) // 3)
                await until(lambda count=count: len(chunks_asked_for(hub)) >= count)  # type: ignore[misc]
            assert await mirror.end(signal.SIGKILL) == -signal.SIGKILL
            known = recorded(mirror)
        now = chunks_asked_for(hub)
        assert not before & set(now), "what was recorded was read again"
        assert known >= before
        assert max(Counter(now).values()) == 1
        asked.update(now)
        before = known
    hub.log.clear()
    async with await ServingProcess.start(tmp_path, BDN_TRANSFERS=str(TRANSFERS)) as mirror:
        document = await mirror.ended(mirror_id)
        assert document["status"] == "READY", document["error"]
        assert document["sources"][0]["error"] is None
        last = chunks_asked_for(hub)
        assert sorted(last) == sorted(set(range(CHUNKS)) - before)
        asked.update(last)
        root = Root.parse((await mirror.http.get(f"/manifests/{document['sources'][0]['manifest']}")).content)
        pages = [(await mirror.http.get(f"/chunks/{page.digest}")).content for page in root.pages]
        (large,) = [file for file in files_of(pages) if file.size == LARGE.size]
        for index, chunk in enumerate(large.layout.chunks):
            content = (await mirror.http.get(f"/chunks/{chunk}")).content
            start = index * CHUNK_SIZE
            assert content == LARGE.read(start, min(start + CHUNK_SIZE, LARGE.size))
        # Every byte was counted once; what a killed worker read and could not record was never counted.
        assert document["bytes_total"] == document["bytes_transferred"] == LARGE.size + 2
        assert document["bytes_reused"] == 0
        assert not list((tmp_path / "store/incoming").iterdir())  # what the kills left half-written
        again = await mirror.ended(await mirror.begin(MODEL))
        assert (again["bytes_transferred"], again["bytes_reused"]) == (0, LARGE.size + 2)
    assert set(asked) == set(range(CHUNKS))


async def test_a_mirror_that_stops_gives_its_claim_back_at_once(upstreams: None, hub: Hub, tmp_path: Path) -> None:
    hub.repo("org/model").commit({"model.safetensors": GeneratedContent(3 * CHUNK_SIZE)})
    hub.fail(stall(), origin="cdn", skip=2)
    async with await ServingProcess.start(tmp_path) as mirror:
        mirror_id = await mirror.begin(MODEL)
        await until(lambda: len(list((tmp_path / "store/chunks").rglob("??????*"))) == 2)
        await until(lambda: len(chunks_asked_for(hub)) == 3)
        assert await mirror.end(signal.SIGTERM) == 0  # although the upstream is silent
        assert mirror.query("SELECT status, claimed_by, claim_expires_at FROM mirrors") == [("SYNCING", None, None)]
        assert len(recorded(mirror)) == 2
        assert "Traceback" not in mirror.log
    hub.log.clear()
    async with await ServingProcess.start(tmp_path) as mirror:
        assert (await mirror.ended(mirror_id))["bytes_transferred"] == 3 * CHUNK_SIZE
        assert await mirror.end(signal.SIGINT) == 0
    assert len(chunks_asked_for(hub)) == 1
