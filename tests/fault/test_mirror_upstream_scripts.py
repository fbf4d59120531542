"""Upstreams that change, or fail in every way and order: right bytes, or the right error and nothing published."""

from dataclasses import dataclass
from random import Random

import pytest

from bdn.core.chunk import CHUNK_SIZE
from tests.doubles.faults import (
    Fault,
    altered,
    answer,
    drop,
    flip_byte,
    gzipped,
    ignore_range,
    rate_limited,
    reset,
    right_after,
    stall,
    truncate,
)
from tests.support.mirror.scripted_upstreams import (
    FILES,
    LARGE,
    OTHER_CONTENT,
    SMALL,
    TRANSFERS,
    ScriptedUpstream,
    check,
)
from tests.support.mirror.service import MirrorUnderTest
from tests.support.promises.tally import FULL

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
    "no answer, ever": Script(drop(), "UPSTREAM_UNAVAILABLE", FOREVER, reads=2 * AGAIN_AND_AGAIN),
    "a stall": Script(stall(at=5_000_000)),
    "a reset at 99 %": Script(reset(at=CHUNK_SIZE * 99 // 100)),
    "200 to every range": Script(ignore_range(), times=FOREVER, reads=3 * CHUNKS + 1, everywhere=True),
    "never the right Content-Range": Script(
        altered({"Content-Range": "bytes 5-9/17"}), "SOURCE_CHANGED", FOREVER, 0, AGAIN_AND_AGAIN
    ),
    "gzip, always": Script(gzipped(), "UPSTREAM_UNAVAILABLE", FOREVER, reads=AGAIN_AND_AGAIN),
    "500 for ever": Script(answer(500), "UPSTREAM_UNAVAILABLE", FOREVER, reads=AGAIN_AND_AGAIN),
    "429 with Retry-After": Script(rate_limited(2)),
    "403 once, as when a signed address expires": Script(answer(403), reads=CHUNKS + 1, everywhere=True),
    "403 for ever": Script(answer(403), "AUTH_REQUIRED", FOREVER, reads=2 * CHUNKS, everywhere=True),
    "a redirect loop": Script(
        answer(302, {"Location": ""}), "UPSTREAM_UNAVAILABLE", FOREVER, reads=6 * AGAIN_AND_AGAIN
    ),
    "404": Script(answer(404), "SOURCE_CHANGED", FOREVER, reads=CHUNKS, everywhere=True),
}  # fmt: skip
SMALL_SCRIPTS = {
    "a truncated body": Script(truncate(at=3), reads=2),
    "no answer": Script(drop(), reads=2),
    "a stall": Script(stall(at=3), reads=2),
    "500 for ever": Script(answer(500), "UPSTREAM_UNAVAILABLE", FOREVER, reads=6),
    "403 once": Script(answer(403), reads=2, everywhere=True),
    "403 for ever": Script(answer(403), "AUTH_REQUIRED", FOREVER, reads=2),
    "404": Script(answer(404), "SOURCE_CHANGED", FOREVER, reads=1, everywhere=True),
}  # fmt: skip
LISTING_SCRIPTS = {
    "500 for a while": Script(answer(500), times=5, reads=6, everywhere=True),
    "429 with Retry-After": Script(rate_limited(2), reads=2, everywhere=True),
    "no answer": Script(drop(), reads=2, everywhere=True),
    "a truncated body": Script(truncate(at=10), reads=2, everywhere=True),
    "403": Script(answer(403), "AUTH_REQUIRED", FOREVER, reads=1, everywhere=True),
    "nonsense": Script(answer(200, body=b"<html>a proxy"), reads=2, everywhere=True),
}


PLAYED = [
    pytest.param(kind, where, script, id=f"{kind}-{where}-{name}")
    for where, scripts in ((LARGE, SCRIPTS), (SMALL, SMALL_SCRIPTS), ("listing", LISTING_SCRIPTS))
    for name, script in scripts.items()
    for kind in (("hf", "s3", "gs") if script.everywhere else ("s3",))
]


@pytest.mark.parametrize(("upstream", "where", "script"), PLAYED, indirect=["upstream"])
async def test_a_listing_or_a_file_whose_requests_fail(
    hasty: MirrorUnderTest, upstream: ScriptedUpstream, where: str, script: Script
) -> None:
    if where == "listing":
        upstream.fail_listing(script.fault, times=script.times)
    else:
        upstream.fail(script.fault, file=where, skip=script.skip if where == LARGE else 0, times=script.times)

    document = await hasty.mirror(upstream.wanted, upstream.neighbour)

    await check(hasty, document, script.code or FILES)
    assert document["sources"][0]["files_total"] in (None, len(FILES)), "nothing is counted twice"
    asked = upstream.log.count(upstream.listing) if where == "listing" else len(upstream.reads(where))
    assert asked <= script.reads
    await a_second_attempt_succeeds(hasty, upstream)


async def a_second_attempt_succeeds(mirror: MirrorUnderTest, upstream: ScriptedUpstream, reads: int = CHUNKS) -> None:
    """And nothing wrong that the first one left behind is taken for a part of the right files."""
    upstream.script.clear()
    upstream.log.clear()
    await check(mirror, await mirror.mirror(upstream.wanted, upstream.neighbour), FILES)
    assert len(upstream.reads()) <= reads


# --- Upstreams that are not the same for the whole length of a copy: other content, other addresses, other hosts ---
CHANGED = {**FILES, LARGE: OTHER_CONTENT}


@pytest.mark.parametrize(
    ("upstream", "skip"), [("s3", 0), ("s3", 1), ("s3", 2), ("hf", 1), ("gs", 1)], indirect=["upstream"]
)
async def test_an_object_that_is_replaced_between_two_ranges_is_never_a_mixture(
    hasty: MirrorUnderTest, upstream: ScriptedUpstream, request: pytest.FixtureRequest, skip: int
) -> None:
    upstream.fail(right_after(upstream.change), skip=skip)

    document = await hasty.mirror(upstream.wanted, upstream.neighbour)

    pinned = "[hf" in request.node.name  # a commit stays what it is; an object without versions does not
    await check(hasty, document, FILES if pinned else "SOURCE_CHANGED")
    upstream.script.clear()
    scripted, _ = (await hasty.mirror(upstream.wanted, upstream.neighbour))["sources"]
    assert scripted["status"] == "READY"
    assert await hasty.tree(scripted["manifest"]) == CHANGED


# --- Whatever sequence of failures an upstream plays: right bytes, or an error that one of the failures explains ---


# Each failure, and the code that it may end with.
FAULTS: dict[str, tuple[Fault, str]] = {
    "flip": (flip_byte(at=7), "CHECKSUM_MISMATCH"),
    "truncate": (truncate(at=7), "UPSTREAM_UNAVAILABLE"),
    "truncate late": (truncate(at=CHUNK_SIZE - 5), "UPSTREAM_UNAVAILABLE"),
    "reset": (reset(at=7), "UPSTREAM_UNAVAILABLE"),
    "reset late": (reset(at=CHUNK_SIZE - 5), "UPSTREAM_UNAVAILABLE"),
    "stall": (stall(at=7), "UPSTREAM_UNAVAILABLE"),
    "drop": (drop(), "UPSTREAM_UNAVAILABLE"),
    "ignore range": (ignore_range(), "UPSTREAM_UNAVAILABLE"),
    "gzip": (gzipped(), "UPSTREAM_UNAVAILABLE"),
    "no range": (altered({"Content-Range": "none"}), "UPSTREAM_UNAVAILABLE"),
    "500": (answer(500), "UPSTREAM_UNAVAILABLE"),
    "503": (answer(503, {"Retry-After": "1"}), "UPSTREAM_UNAVAILABLE"),
    "429": (rate_limited(1), "UPSTREAM_RATE_LIMITED"),
    "403": (answer(403), "AUTH_REQUIRED"),
    "404": (answer(404), "SOURCE_CHANGED"),
}


@pytest.mark.parametrize(
    ("upstream", "seed"),
    [(("hf", "s3", "gs")[seed % 3], seed) for seed in range(30 if FULL else 9)],
    indirect=["upstream"],
)
async def test_a_sequence_of_failures_is_survived_or_explained(
    hasty: MirrorUnderTest, upstream: ScriptedUpstream, seed: int
) -> None:
    random, failures, codes = Random(seed), 0, set[str]()
    for _ in range(random.randint(1, 6)):
        fault, code = FAULTS[random.choice(sorted(FAULTS))]
        times = random.choice([1, 1, 2, 3, 7])
        upstream.fail(fault, file=random.choice([LARGE, LARGE, SMALL]), skip=random.randint(0, 3), times=times)
        failures += times
        codes.add(code)

    document = await hasty.mirror(upstream.wanted, upstream.neighbour)

    error = document["sources"][0]["error"]
    assert error is None or error["code"] in codes, error
    await check(hasty, document, error["code"] if error else FILES)
    assert len(upstream.reads(LARGE)) <= 2 * CHUNKS + failures + CHUNKS  # twice, if it came wrong
    assert len(upstream.reads(SMALL)) <= 1 + failures + 1
    await a_second_attempt_succeeds(hasty, upstream, reads=2 + CHUNKS)  # more only for a wrong chunk of the first one
