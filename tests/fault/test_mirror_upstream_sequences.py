"""Whatever sequence of failures an upstream plays: right bytes, or an error that one of the failures explains."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from huggingface_hub import close_session
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

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
    stall,
    truncate,
)
from tests.doubles.gcs import GcsServer
from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Server
from tests.support.mirror.scripted_upstreams import (
    FILES,
    LARGE,
    SMALL,
    STALL,
    TRANSFERS,
    Pauses,
    ScriptedGcs,
    ScriptedHub,
    ScriptedS3,
    ScriptedUpstream,
    check,
)
from tests.support.mirror.service import mirror_under_test
from tests.support.network.egress import ALLOW_LOOPBACK

# Without a search for a smaller example, which would take minutes: a sequence is short.
PROFILE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=30 if os.environ.get("BDN_FAULT") == "full" else 8,
    phases=[Phase.explicit, Phase.generate],
)

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


@dataclass(frozen=True)
class Order:
    fault: str
    file: str
    skip: int
    times: int


orders = st.builds(
    Order,
    fault=st.sampled_from(sorted(FAULTS)),
    file=st.sampled_from([LARGE, LARGE, SMALL]),
    skip=st.integers(0, 3),
    times=st.sampled_from([1, 1, 2, 3, 7]),
)


@dataclass(frozen=True)
class Doubles:
    hub: Hub
    s3: S3Server
    gcs: GcsServer

    @contextmanager
    def scripted(self, kind: str) -> Iterator[ScriptedUpstream]:
        """A fresh source, with the environment that leads a mirror there."""
        with pytest.MonkeyPatch.context() as patch:
            for name in os.environ:
                if name.startswith(("BDN_", "AWS_", "HF_")) or name.upper().endswith("_PROXY"):
                    patch.delenv(name)
            patch.setenv("BDN_EGRESS_ALLOW", ALLOW_LOOPBACK)
            patch.setattr("bdn.mirror.ingest.copier.TURN_SECONDS", 0.2)
            self.hub.clear()
            match kind:
                case "hf":
                    patch.setenv("HF_ENDPOINT", self.hub.url)
                    yield ScriptedHub(self.hub)
                case "s3":
                    account = self.s3.account
                    patch.setenv("AWS_ENDPOINT_URL_S3", self.s3.url)
                    keys = f'"access_key_id": "{account.access_key_id}", "secret_access_key": "{account.secret_access_key}"'
                    patch.setenv("BDN_SECRET_S3_KEYS", f"{{{keys}}}")
                    yield ScriptedS3(self.s3)
                case _:
                    scripted = ScriptedGcs(self.gcs)
                    patch.setenv("STORAGE_EMULATOR_HOST", self.gcs.url)
                    patch.setenv("BDN_GOOGLE_TOKEN_URL", self.gcs.token_url)
                    patch.setenv("BDN_SECRET_GS_KEY", scripted.secret)
                    yield scripted
            self.hub.release_stalled()


@pytest.fixture(scope="module")
def doubles() -> Iterator[Doubles]:
    with Hub() as hub, S3Server() as s3, GcsServer() as gcs:
        yield Doubles(hub, s3, gcs)
    close_session()


async def play(upstream: ScriptedUpstream, sequence: list[Order], folder: Path) -> None:
    allowed = {FAULTS[order.fault][1] for order in sequence}
    for order in sequence:
        upstream.fail(FAULTS[order.fault][0], file=order.file, skip=order.skip, times=order.times)
    upstream.log.clear()
    async with mirror_under_test(folder / "mirror", pause=Pauses(), stall=STALL, transfers=TRANSFERS) as mirror:
        document = await mirror.mirror(upstream.wanted, upstream.neighbour)
        error = document["sources"][0]["error"]
        assert error is None or error["code"] in allowed, error
        await check(mirror, document, error["code"] if error else FILES)
        assert (
            len(upstream.reads(LARGE)) <= 2 * 3 + sum(order.times for order in sequence) + 3
        )  # twice, if it came wrong
        assert len(upstream.reads(SMALL)) <= 1 + sum(order.times for order in sequence) + 1
        upstream.script.clear()
        upstream.log.clear()
        await check(mirror, await mirror.mirror(upstream.wanted, upstream.neighbour), FILES)
        assert len(upstream.reads(LARGE)) <= 2 + 3, (
            "more than once only if a wrong chunk was left of the failed attempt"
        )


@PROFILE
@given(kind=st.sampled_from(["hf", "s3", "gs"]), sequence=st.lists(orders, min_size=1, max_size=6))
def test_a_sequence_of_failures_ends_with_the_right_bytes_or_with_an_error_that_it_explains(
    doubles: Doubles, kind: str, sequence: list[Order]
) -> None:
    with doubles.scripted(kind) as upstream, TemporaryDirectory() as folder:
        asyncio.run(play(upstream, sequence, Path(folder)))
