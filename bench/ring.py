"""What a cluster costs the mirror, and how long its last member waits."""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import nginx
from bench import ring_of_agents as ring
from bench.report import Figure, Missing, Row, scaled_size
from tests.doubles.seaweed import SeaweedServer
from tests.support.content.bucket_stores import store_environment
from tests.support.network import network

FILES, SIZE = 4, 256 * 1024**2
SIZES = {8: 200_000_000, 20: 100_000_000}  # members, and the links' bits per second
PREFIX = "model"
DELAY_SECONDS = 0.025  # each way


@dataclass(frozen=True)
class _Run:
    seconds: float
    link_share: float
    plane_share: float


def measure() -> list[Row]:
    """Each size alone, together and hurt; the smaller one also far from its mirror, the larger one from a bucket."""
    if reason := network.unavailable():
        return [Missing(f"{count} agents", reason, "<= 1.05 x unique, <= 2.0 x alone") for count in SIZES]
    with _content() as content:
        rows: list[Row] = []
        for count, rate in SIZES.items():
            rows += _size(content, count, rate)
        count, rate = next(iter(SIZES.items()))
        far = _run(content, count, rate, delay_seconds=DELAY_SECONDS)
        rows += [
            Figure(f"{count} agents, far: last agent", "s", (far.seconds,)),
            Figure(f"{count} agents, far: bytes from the mirror", "x unique", (far.link_share,)),
        ]
    return [*rows, *from_a_bucket(*max(SIZES.items()))]


def _size(content: ring.Content, count: int, rate: int) -> list[Row]:
    alone = _run(content, 1, rate)
    together = _run(content, count, rate)
    hurt = _run(content, count, rate, hurt_after=together.seconds / 2)
    title = f"{count} agents at {rate // 1_000_000} Mbit/s"
    return [
        Figure(f"{title}: one agent alone", "s", (alone.seconds,)),
        Figure(f"{title}: last agent", "s", (together.seconds,)),
        Figure(f"{title}: last agent to one alone", "x", (together.seconds / alone.seconds,), "<= 2.0"),
        Figure(f"{title}: bytes from the mirror", "x unique", (together.link_share,), "<= 1.05"),
        Figure(f"{title}: of its data plane", "x unique", (together.plane_share,), "<= 1.05"),
        Figure(f"{title}, hurt: last agent", "s", (hurt.seconds,)),
        Figure(f"{title}, hurt: last agent to one alone", "x", (hurt.seconds / alone.seconds,), "<= 2.5"),
        Figure(f"{title}, hurt: bytes from the mirror", "x unique", (hurt.link_share,)),
    ]


def from_a_bucket(count: int, rate: int) -> list[Row]:
    """The mirror's store is a bucket in a host of its own, which agents read by themselves."""
    with (
        tempfile.TemporaryDirectory() as name,
        nginx.serving_s3({PREFIX: (FILES, scaled_size(SIZE))}) as origin,
        network.network() as net,
    ):
        root, place = Path(name), net.host()
        with SeaweedServer(root / "bucket", host=place) as server:
            store = store_environment(server, f"s3://{server.bucket('store')}/bdn")
            source = f"s3://{nginx.BUCKET}/{PREFIX}/"
            planted = ring.planted(
                origin.folder(PREFIX), root / "planted", source, store, AWS_ENDPOINT_URL_S3=origin.url
            )
            (root / "ring").mkdir()
            with ring.ring(net, root / "ring", planted, count, rate) as built:
                place.shape(rate)
                sent = place.sent_bytes
                done = [
                    member.agent.finished(stage) for member, stage in zip(built.members, built.begin(), strict=True)
                ]
                sent, served = place.sent_bytes - sent, built.mirror.served_bytes
                for stage in done:
                    planted.check(stage)
    title = f"{count} agents at {rate // 1_000_000} Mbit/s, from a bucket"
    return [
        Figure(f"{title}: last agent", "s", (ring.span(done),)),
        Figure(f"{title}: bytes from the bucket", "x unique", (sent / planted.size,), "<= 1.05"),
        Figure(f"{title}: of the mirror's data plane", "x unique", (served / planted.size,), "<= 0"),
    ]


@contextlib.contextmanager
def _content() -> Iterator[ring.Content]:
    with tempfile.TemporaryDirectory() as folder, nginx.serving_s3({PREFIX: (FILES, scaled_size(SIZE))}) as origin:
        source = f"s3://{nginx.BUCKET}/{PREFIX}/"
        yield ring.planted(origin.folder(PREFIX), Path(folder) / "mirror", source, AWS_ENDPOINT_URL_S3=origin.url)


def _run(
    content: ring.Content, count: int, rate: int, *, hurt_after: float | None = None, delay_seconds: float = 0
) -> _Run:
    with (
        tempfile.TemporaryDirectory(dir=content.data.parents[1]) as folder,
        network.network() as net,
        ring.ring(net, Path(folder), content, count, rate, delay_seconds) as built,
    ):
        sent, served = built.host.sent_bytes, built.mirror.served_bytes
        stages = built.begin()
        spared = list(zip(built.members, stages, strict=True))
        if hurt_after is not None:
            time.sleep(hurt_after)
            spared = _hurt(spared, rate)
        done = [member.agent.finished(stage) for member, stage in spared]
        run = _Run(
            ring.span(done),
            (built.host.sent_bytes - sent) / content.size,
            (built.mirror.served_bytes - served) / content.size,
        )
        for stage in done:
            content.check(stage)
    os.sync()
    return run


def _hurt(members: list[tuple[ring.Member, str]], rate: int) -> list[tuple[ring.Member, str]]:
    """The first is killed, the second is slow from now on; the others."""
    (killed, _), (slowed, _), *others = members
    killed.agent.process.kill()
    slowed.host.shape(rate // 20)
    return others
