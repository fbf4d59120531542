"""Upstreams that change, or fail in any order: right bytes, or the right error and nothing published."""

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
    ScriptedUpstream,
    check,
)
from tests.support.mirror.service import MirrorUnderTest
from tests.support.promises.tally import FULL

pytest_plugins = ("tests.support.mirror.fixtures", "tests.support.mirror.upstream_fixtures")
CHUNKS = 3


async def a_second_attempt_succeeds(mirror: MirrorUnderTest, upstream: ScriptedUpstream, reads: int = CHUNKS) -> None:
    """And nothing wrong that the first one left behind is taken for a part of the right files."""
    upstream.script.clear()
    upstream.log.clear()
    await check(mirror, await mirror.mirror(upstream.wanted, upstream.neighbour), FILES)
    assert len(upstream.reads()) <= reads


# --- Objects that are not the same for the whole length of a copy ---
CHANGED = {**FILES, LARGE: OTHER_CONTENT}


@pytest.mark.parametrize(
    ("upstream", "skip"),
    [("s3", 0), ("s3", 1), ("s3", 2), ("hf", 1), ("gs", 1), ("hf bucket", 1), ("mirrored bucket", 1)],
    indirect=["upstream"],
)
async def test_an_object_that_is_replaced_between_two_ranges_is_never_a_mixture(
    hasty: MirrorUnderTest, upstream: ScriptedUpstream, request: pytest.FixtureRequest, skip: int
) -> None:
    upstream.fail(right_after(upstream.change), skip=skip)

    document = await hasty.mirror(upstream.wanted, upstream.neighbour)

    pinned = (
        "[hf" in request.node.name
    )  # commits and addresses named by content stay; an object without versions does not
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
