"""Upstreams that fail in every way: each mirror ends with right bytes, or with the right error and nothing published.

Every script is played on S3. Those whose outcome depends on how an upstream locates, pins or frames content (``everywhere``) are
played on the others, too. Wrong content is in ``promises/test_corruption_from_upstreams.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from bdn.core.chunk import CHUNK_SIZE
from tests.doubles.faults import (
    Fault,
    altered,
    another_range,
    answer,
    drop,
    gzipped,
    ignore_range,
    rate_limited,
    reset,
    stall,
    trickle,
    truncate,
)
from tests.support.mirror.scripted_upstreams import FILES, SMALL, TRANSFERS, ScriptedUpstream, check
from tests.support.mirror.service import MirrorUnderTest

pytest_plugins = ("tests.support.mirror.fixtures", "tests.support.mirror.upstream_fixtures")

CHUNKS = 3
FAILURES_OF_A_FILE = 10  # that it is forgiven


@dataclass(frozen=True)
class Script:
    """``code`` None ends READY. ``reads`` is the most that the large file may be asked for, in one attempt to mirror."""

    fault: Fault
    code: str | None = None
    times: int | None = 1
    skip: int = 1
    reads: int = CHUNKS + 1
    everywhere: bool = False


FOREVER = None
AGAIN_AND_AGAIN = CHUNKS + FAILURES_OF_A_FILE + TRANSFERS

SCRIPTS = {
    "a truncated body": Script(truncate(at=5_000_000), everywhere=True),
    "no answer": Script(drop()),
    "no answer, ever": Script(drop(), "UPSTREAM_UNAVAILABLE", FOREVER, reads=2 * AGAIN_AND_AGAIN),
    "a stall": Script(stall(at=5_000_000)),
    "a stall before the first byte of the body": Script(stall()),
    "a trickle of 1 KB/s": Script(trickle(at=5_000_000)),
    "a reset at 99 %": Script(reset(at=CHUNK_SIZE * 99 // 100)),
    "resets at 99 %": Script(reset(at=CHUNK_SIZE * 99 // 100), times=2, reads=CHUNKS + 2),
    "200 to a range": Script(ignore_range()),
    "200 to every range": Script(ignore_range(), "UPSTREAM_UNAVAILABLE", FOREVER, reads=AGAIN_AND_AGAIN),
    "another range": Script(another_range()),
    "no Content-Range": Script(altered({"Content-Range": "none"})),
    "never the right Content-Range": Script(
        altered({"Content-Range": "bytes 5-9/17"}), "SOURCE_CHANGED", FOREVER, 0, AGAIN_AND_AGAIN
    ),
    "gzip": Script(gzipped(), everywhere=True),
    "gzip, always": Script(gzipped(), "UPSTREAM_UNAVAILABLE", FOREVER, reads=AGAIN_AND_AGAIN),
    "500 for a while": Script(answer(500), times=5, reads=CHUNKS + 5),
    "500 for ever": Script(answer(500), "UPSTREAM_UNAVAILABLE", FOREVER, reads=AGAIN_AND_AGAIN),
    "503 with Retry-After": Script(answer(503, {"Retry-After": "2"})),
    "429 with Retry-After": Script(rate_limited(2)),
    "429 for ever": Script(rate_limited(2), "UPSTREAM_RATE_LIMITED", FOREVER, reads=AGAIN_AND_AGAIN),
    "403 once, as when a signed address expires": Script(answer(403), reads=CHUNKS + 1, everywhere=True),
    "403 for ever": Script(answer(403), "AUTH_REQUIRED", FOREVER, reads=2 * CHUNKS, everywhere=True),
    "401 once": Script(answer(401), reads=CHUNKS + 1),
    "a redirect loop": Script(
        answer(302, {"Location": ""}), "UPSTREAM_UNAVAILABLE", FOREVER, reads=6 * AGAIN_AND_AGAIN
    ),
    "404": Script(answer(404), "SOURCE_CHANGED", FOREVER, reads=CHUNKS, everywhere=True),
    "412": Script(answer(412), "SOURCE_CHANGED", FOREVER, reads=CHUNKS, everywhere=True),
    "416": Script(answer(416), "SOURCE_CHANGED", FOREVER, reads=CHUNKS),
}  # fmt: skip


SMALL_SCRIPTS = {
    "a truncated body": Script(truncate(at=3), reads=2),
    "no answer": Script(drop(), reads=2),
    "a reset": Script(reset(at=3), reads=2),
    "a stall": Script(stall(at=3), reads=2),
    "gzip": Script(gzipped(), reads=2, everywhere=True),
    "500 for a while": Script(answer(500), times=4, reads=5),
    "500 for ever": Script(answer(500), "UPSTREAM_UNAVAILABLE", FOREVER, reads=6),
    "503 with Retry-After": Script(answer(503, {"Retry-After": "2"}), reads=2),
    "429 for ever": Script(rate_limited(2), "UPSTREAM_RATE_LIMITED", FOREVER, reads=6),
    "403 once": Script(answer(403), reads=2, everywhere=True),
    "403 for ever": Script(answer(403), "AUTH_REQUIRED", FOREVER, reads=2),
    "404": Script(answer(404), "SOURCE_CHANGED", FOREVER, reads=1, everywhere=True),
}  # fmt: skip

LISTING_SCRIPTS = {
    "500 for a while": Script(answer(500), times=5, reads=6, everywhere=True),
    "500 for ever": Script(answer(500), "UPSTREAM_UNAVAILABLE", FOREVER, reads=6),
    "429 with Retry-After": Script(rate_limited(2), reads=2, everywhere=True),
    "429 for ever": Script(rate_limited(2), "UPSTREAM_RATE_LIMITED", FOREVER, reads=6),
    "no answer": Script(drop(), reads=2, everywhere=True),
    "a truncated body": Script(truncate(at=10), reads=2, everywhere=True),
    "a reset": Script(reset(at=10), reads=2),
    "403": Script(answer(403), "AUTH_REQUIRED", FOREVER, reads=1, everywhere=True),
    "nonsense": Script(answer(200, body=b"<html>a proxy"), reads=2, everywhere=True),
}


def played(scripts: Mapping[str, Script]) -> pytest.MarkDecorator:
    rows = [
        pytest.param(kind, script, id=f"{kind}-{name}")
        for name, script in scripts.items()
        for kind in (("hf", "s3", "gs") if script.everywhere else ("s3",))
    ]
    return pytest.mark.parametrize(("upstream", "script"), rows, indirect=["upstream"])


@played(SCRIPTS)
async def test_a_file_whose_ranges_fail(hasty: MirrorUnderTest, upstream: ScriptedUpstream, script: Script) -> None:
    upstream.fail(script.fault, skip=script.skip, times=script.times)

    document = await hasty.mirror(upstream.wanted, upstream.neighbour)

    await check(hasty, document, script.code or FILES)
    assert len(upstream.reads()) <= script.reads
    await a_second_attempt_succeeds(hasty, upstream)


@played(SMALL_SCRIPTS)
async def test_a_small_file_that_fails_among_others(
    hasty: MirrorUnderTest, upstream: ScriptedUpstream, script: Script
) -> None:
    upstream.fail(script.fault, file=SMALL, times=script.times)

    document = await hasty.mirror(upstream.wanted, upstream.neighbour)

    await check(hasty, document, script.code or FILES)
    assert len(upstream.reads(SMALL)) <= script.reads
    await a_second_attempt_succeeds(hasty, upstream)


@played(LISTING_SCRIPTS)
async def test_a_listing_that_fails(hasty: MirrorUnderTest, upstream: ScriptedUpstream, script: Script) -> None:
    upstream.fail_listing(script.fault, times=script.times)

    document = await hasty.mirror(upstream.wanted, upstream.neighbour)

    await check(hasty, document, script.code or FILES)
    assert document["sources"][0]["files_total"] in (None, len(FILES)), "nothing is counted twice"
    assert upstream.log.count(upstream.listing) <= script.reads
    await a_second_attempt_succeeds(hasty, upstream)


async def a_second_attempt_succeeds(mirror: MirrorUnderTest, upstream: ScriptedUpstream) -> None:
    """And nothing wrong that the first one left behind is taken for a part of the right files."""
    upstream.script.clear()
    upstream.log.clear()
    await check(mirror, await mirror.mirror(upstream.wanted, upstream.neighbour), FILES)
    assert len(upstream.reads()) <= CHUNKS
