"""A bit that flips on the way from an upstream: the file is asked for once more, and the wrong bytes are kept.

Played by a proxy in front of the servers of each kind of upstream.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import Digest, digest_of
from tests.doubles.faults import flip_byte
from tests.doubles.hub import Hub
from tests.support.crash.rot import rot
from tests.support.mirror.scripted_upstreams import CONTENT, FILES, LARGE, SMALL, STALL, Pauses, ScriptedUpstream
from tests.support.mirror.service import LONGEST_SECONDS, MirrorUnderTest, mirror_under_test, source
from tests.support.network.fault_proxy import FaultProxy, passes
from tests.support.network.fault_proxy_faults import flips_a_bit
from tests.support.promises.tally import Scale, Tally

KINDS: Final = ["hf", "s3", "r2", "gs"]
pytestmark = pytest.mark.promise("corruption")
pytest_plugins = ("tests.support.mirror.fixtures", "tests.support.mirror.upstream_fixtures")

CHUNKS: Final = [CONTENT[start : start + CHUNK_SIZE] for start in range(0, len(CONTENT), CHUNK_SIZE)]


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


def evidence(mirror: MirrorUnderTest) -> list[list[Digest]]:
    """What is kept of each file that came wrong."""
    rows = mirror.rows("quarantined_files")["quarantined_files"]
    return [[Digest.from_bytes(row[-1][at : at + 32]) for at in range(0, len(row[-1]), 32)] for row in rows]


@pytest.mark.parametrize("upstream", KINDS, indirect=True)
async def test_a_bit_flipped_on_the_wire_costs_the_file_once_more_and_only_its_wrong_chunk_is_kept(
    mirror: MirrorUnderTest, upstream: ScriptedUpstream, proxy: FaultProxy, tally: Tally, scale: Scale
) -> None:
    hit = scale.of(1, 2)  # 2 is the last chunk, which is short
    proxy.play(*[passes] * hit, flips_a_bit)
    document = await mirror.ready(upstream.wanted)

    found = await mirror.tree(document["sources"][0]["manifest"])
    tally.add(scenarios=1, faults=proxy.met["flips_a_bit"], wrong=found != FILES, repaired=1)
    assert proxy.met["flips_a_bit"] == 1
    assert found == FILES
    [kept] = evidence(mirror)
    assert kept == [digest_of(flipped(CHUNKS[hit]))]
    assert kept[0].fanout in mirror.chunks()
    assert len(upstream.reads(LARGE)) == 2 * len(CHUNKS)
    assert document["bytes_transferred"] == sum(map(len, FILES.values())) + len(CONTENT)
    assert b"bdn_mirror_quarantined_files 1.0" in (await mirror.http.get("/metrics")).content


@pytest.mark.parametrize("upstream", KINDS[1:], indirect=True)
async def test_a_bit_flipped_in_one_small_file_costs_that_file_once_more(
    mirror: MirrorUnderTest, upstream: ScriptedUpstream, proxy: FaultProxy, tally: Tally
) -> None:
    proxy.chosen = lambda asked: SMALL in asked and ("/o/" not in asked or "alt=media" in asked)
    proxy.play(flips_a_bit)
    document = await mirror.ready(upstream.wanted)

    found = await mirror.tree(document["sources"][0]["manifest"])
    tally.add(scenarios=1, faults=proxy.met["flips_a_bit"], wrong=found != FILES, repaired=1)
    assert proxy.met["flips_a_bit"] == 1
    assert found == FILES
    assert evidence(mirror) == [[digest_of(flipped(FILES[SMALL]))]]
    assert [len(upstream.reads(path)) for path in FILES] == [len(CHUNKS), 2, 1]


@pytest.mark.parametrize("upstream", KINDS, indirect=True)
@pytest.mark.parametrize("path", [LARGE, SMALL])
async def test_what_comes_wrong_twice_is_never_published_and_ends_with_the_name_of_the_file(
    mirror: MirrorUnderTest, upstream: ScriptedUpstream, path: str, tally: Tally
) -> None:
    upstream.fail(flip_byte(at=10), file=path, times=None)
    error = await mirror.failed(upstream.wanted)
    asked, kept = len(upstream.reads(path)), evidence(mirror)
    upstream.script.clear()

    document = await mirror.ready(upstream.wanted)
    found = await mirror.tree(document["sources"][0]["manifest"])
    tally.add(scenarios=1, faults=asked, refused=1, wrong=found != FILES)
    assert error["code"] == "CHECKSUM_MISMATCH"
    assert repr(path) in error["message"]
    assert asked == 2 * (len(CHUNKS) if path == LARGE else 1), "once more, and not for ever"
    assert len(kept) == 2, kept
    assert kept[0] == kept[1] != []


async def test_a_bit_flipped_while_a_damaged_chunk_is_repaired_costs_that_range_once_more(
    upstreams: None, hub: Hub, tmp_path: Path, tally: Tally
) -> None:
    hub.repo("org/model").commit({LARGE: CONTENT})
    async with mirror_under_test(tmp_path / "mirror", pause=Pauses()) as mirror:
        await mirror.ready(source("hf://org/model"))
        rot(mirror.data_dir / "store" / "chunks" / digest_of(CHUNKS[1]).fanout, "flipped")
        hub.log.clear()
        hub.fail(flip_byte(at=10), origin="cdn")
        answer = await mirror.http.post("/verifications", params={"wait": LONGEST_SECONDS}, json={"all": True})
        [item] = answer.json()["items"]
        tally.add(scenarios=1, faults=2, repaired=1)
        assert (item["outcome"], item["chunk"]) == ("repaired", str(digest_of(CHUNKS[1])))
        assert [one.bytes_served for one in hub.log.find(origin="cdn")] == [CHUNK_SIZE] * 2
