"""A bit that flips on the way from an upstream to the mirror."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from tests.doubles.faults import flip_byte
from tests.doubles.hub import Hub
from tests.support.content.layouts import pieces
from tests.support.crash.rot import rot
from tests.support.mirror.scripted_upstreams import CONTENT, FILES, LARGE, SMALL, STALL, Pauses, ScriptedUpstream
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source
from tests.support.network.fault_proxy import FaultProxy, passes
from tests.support.network.fault_proxy_faults import flips_a_bit
from tests.support.promises.tally import Tally, at_scale

pytest_plugins = ("tests.support.mirror.fixtures", "tests.support.mirror.upstream_fixtures")
pytestmark = [pytest.mark.promise("corruption"), pytest.mark.usefixtures("backend")]
KINDS: Final = ["hf", "s3", "r2", "gs"]
CHUNKS: Final = pieces(CONTENT)


@pytest.fixture
async def mirror(proxy: FaultProxy, no_turns: None, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    """It asks for one range after the other, so that it is known which chunk is hit."""
    async with mirror_under_test(tmp_path / "mirror", pause=Pauses(), stall=STALL, transfers=1) as mirror:
        yield mirror


def flipped(content: bytes) -> bytes:
    """As the proxy leaves it."""
    wrong = bytearray(content)
    wrong[len(wrong) // 2] ^= 1
    return bytes(wrong)


EVIDENCE: Final = ("id", "created_at", "mirror_id", "source", "path", "size", "expected", "actual")
KEPT: Final = """SELECT digest FROM chunks JOIN set_chunks ON chunk_id = chunks.id JOIN chunk_sets ON chunk_sets.id = set_id
    WHERE owner = ? ORDER BY digest"""


def evidence(mirror: MirrorUnderTest) -> list[dict[str, Any]]:
    """What is kept of each file that came wrong."""
    rows = mirror.rows("quarantined_files")["quarantined_files"]
    return [
        dict(zip(EVIDENCE, row, strict=True))
        | {"chunks": [Digest.from_bytes(raw) for (raw,) in mirror.behind.query(KEPT, f"evidence:{row[0]}")]}
        for row in rows
    ]


@pytest.mark.parametrize(
    ("upstream", "path"),
    [*((kind, LARGE) for kind in KINDS), *((kind, SMALL) for kind in KINDS[1:])],  # a hub sends small files itself
    indirect=["upstream"],
)
async def test_a_bit_flipped_on_the_wire_costs_the_file_once_more_and_what_came_is_kept(
    mirror: MirrorUnderTest, upstream: ScriptedUpstream, proxy: FaultProxy, path: str, tally: Tally
) -> None:
    chunks = {LARGE: CHUNKS, SMALL: [FILES[SMALL]]}[path]
    hit = at_scale(1, 2) if path == LARGE else 0  # 2 is the last chunk, which is short
    if path == SMALL:
        proxy.chosen = lambda asked: SMALL in asked and ("/o/" not in asked or "alt=media" in asked)
    proxy.play(*[passes] * hit, flips_a_bit)
    document = await mirror.ready(upstream.wanted)

    found = await mirror.tree(document["sources"][0]["manifest"])
    tally.add(scenarios=1, faults=proxy.met["flips_a_bit"], wrong=found != FILES, repaired=1)
    assert proxy.met["flips_a_bit"] == 1
    [kept] = evidence(mirror)
    came = [flipped(one) if index == hit else one for index, one in enumerate(chunks)]
    assert set(kept["chunks"]) == set(map(digest_of, came))
    assert {chunk.fanout for chunk in kept["chunks"]} <= mirror.chunks().keys()
    assert len(upstream.reads(path)) == 2 * len(chunks)
    again = len(CONTENT) if path == LARGE else 0  # what is packed counts once
    assert document["bytes_transferred"] == sum(map(len, FILES.values())) + again
    assert b"bdn_mirror_quarantined_files 1.0" in (await mirror.http.get("/metrics")).content


@pytest.mark.parametrize("upstream", KINDS, indirect=True)
@pytest.mark.parametrize("path", [LARGE, SMALL])
async def test_what_comes_wrong_twice_is_never_published_and_ends_with_the_name_of_the_file(
    mirror: MirrorUnderTest, upstream: ScriptedUpstream, path: str, tally: Tally
) -> None:
    upstream.fail(flip_byte(at=10), file=path, times=None)
    error = await mirror.failed(upstream.wanted)
    asked, (kept, again) = len(upstream.reads(path)), evidence(mirror)
    [failed] = mirror.rows("mirrors")["mirrors"]
    assert {chunk.fanout for chunk in kept["chunks"]} <= mirror.chunks().keys()
    upstream.script.clear()

    found = await mirror.tree(await mirror.manifest(upstream.wanted))
    tally.add(scenarios=1, faults=asked, refused=1, wrong=found != FILES)
    assert error["code"] == "CHECKSUM_MISMATCH"
    assert repr(path) in error["message"]
    assert asked == 2 * (len(CHUNKS) if path == LARGE else 1), "once more, and not for ever"
    assert kept["chunks"] == again["chunks"] != []
    assert (kept["mirror_id"], kept["path"], kept["size"]) == (failed[0], path, len(FILES[path]))
    assert kept["source"].startswith(upstream.wanted["source"].split("@")[0])
    assert kept["expected"] in error["message"]
    assert kept["actual"] in error["message"]


async def test_a_bit_flipped_while_a_damaged_chunk_is_repaired_costs_the_file_once_more(
    upstreams: None, hub: Hub, tmp_path: Path
) -> None:
    hub.repo("org/model").commit({LARGE: CONTENT})
    async with mirror_under_test(tmp_path / "mirror", pause=Pauses()) as mirror:
        await mirror.ready(source("hf://org/model"))
        with mirror.behind.chunk(digest_of(CHUNKS[1])) as stored:
            rot(stored, "flipped")
        hub.log.clear()
        hub.fail(flip_byte(at=10), origin="cdn")
        [item] = (await mirror.verify())["items"]
        assert (item["outcome"], item["chunk"]) == ("repaired", str(digest_of(CHUNKS[1])))
        first, *again = [one.bytes_served for one in hub.log.find(origin="cdn")]
    assert (first, sum(again)) == (CHUNK_SIZE, len(CONTENT))
