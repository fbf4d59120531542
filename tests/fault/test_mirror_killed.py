"""The real ``bdn serve``, ended in the middle of a copy."""

import signal
from pathlib import Path

from bdn.core.chunk import CHUNK_SIZE
from bdn.mirror.db.identities import NOT_YET, RAW
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.mirror.process import ServingProcess
from tests.support.mirror.service import source, until

pytest_plugins = ("tests.support.mirror.fixtures",)
MODEL = source("hf://org/model")


def recorded(mirror: ServingProcess) -> set[int]:
    """The chunks of the large file that the next worker will find."""
    found = mirror.query(f"SELECT chunks FROM identities WHERE size > {CHUNK_SIZE}")
    pieces = [raw[at : at + RAW] for (raw,) in found for at in range(0, len(raw), RAW)]
    return {index for index, piece in enumerate(pieces) if piece != NOT_YET}


async def test_a_mirror_that_stops_gives_its_claim_back_at_once(upstreams: None, hub: Hub, tmp_path: Path) -> None:
    hub.repo("org/model").commit({"model.safetensors": GeneratedContent(3 * CHUNK_SIZE)})
    hub.fail(stall(), origin="cdn", skip=2)
    async with await ServingProcess.start(tmp_path) as mirror:
        mirror_id = await mirror.begin(MODEL)
        await until(lambda: len(list((tmp_path / "store/chunks").rglob("??????*"))) == 2)
        await until(lambda: hub.log.count(origin="cdn") == 3)
        assert await mirror.end(signal.SIGTERM) == 0  # although the upstream is silent
        assert mirror.query("SELECT status, claimed_by, claim_expires_at FROM mirrors") == [("SYNCING", None, None)]
        assert len(recorded(mirror)) == 2
        assert "Traceback" not in mirror.log
    hub.log.clear()
    async with await ServingProcess.start(tmp_path) as mirror:
        assert (await mirror.ended(mirror_id))["bytes_transferred"] == 3 * CHUNK_SIZE
        assert await mirror.end(signal.SIGINT) == 0
    assert hub.log.count(origin="cdn") == 1
