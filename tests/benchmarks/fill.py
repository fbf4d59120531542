"""How fast an agent fills its disk from the mirror, beside the disk itself and beside the others."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks import fio, page_cache, peers, s3_origin
from tests.benchmarks.report import Figure, Missing, Row, ratios
from tests.benchmarks.scale import RUNS, scaled_size
from tests.support import services

INTRODUCTION = """
Cold stage of 4 files of 2 GiB: `bdn-node-agent` fills its cache from the data plane of `bdn serve`, every chunk verified by
BLAKE3, every file synced and renamed into place, the view built; the clock is the agent's own, from the request to READY.
In turn with *fio*: direct sequential writes to as many fresh files of the same size, in blocks of 8 MiB, 8 at any time,
with fsync. Both processes of ours run with their defaults; the mirror's chunks are in the page cache. CPU is that of the
agent's process; memory is its `VmHWM`. Between runs the agent evicts everything and the file system is synced; its mount
option `discard`, where it is set, may still be at work on freed blocks when the next one starts, whoever that is.
"""
PEERS_INTRODUCTION = """
The same cold stage of 4 files of 2 GiB as in *fill*, in turn with what others do: each program fetches the same bytes from
nginx (ranges, keep-alive, its files in the page cache), and `sync -f` of its folder is counted in, since none of them syncs.
None of them compares content with a digest: truss-transfer, s5cmd, aria2c, hf_transfer and rclone look at sizes (rclone at an
MD5, where the server has one; this one has not). Their settings are their defaults, except: aria2c with 8 connections for
each of 4 files at once and preallocation; hf_transfer as `huggingface_hub` calls it, 4 files at once; rclone with 4 transfers
of 4 streams. The agent cannot read from nginx, nor they from the mirror: each has the server that it is made for.
"""
FILES, SIZE, IN_FLIGHT = 4, 2 * 1024**3, 8
PREFIX = "model"
ASKED = {
    peers.TRUSS_TRANSFER: ">= 3",
    peers.S5CMD: ">= 2.5",
    peers.ARIA2C: ">= 3.5",
    peers.HF_TRANSFER: "",
    peers.RCLONE: "",
}


@dataclass
class Ours:
    """A mirror that holds the content, and an agent that is asked for it again and again."""

    mirror: services.Mirror
    agent: services.Agent
    grant: str
    size: int
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def stage(self) -> Path:
        """One cold stage; where its files are."""
        page_cache.keep(page_cache.files_below(self.mirror.store))
        before = self.agent.cpu_seconds
        stage = self.agent.stage(self.grant, f"job-{len(self.rates)}")
        came = stage["mounts"][0]["bytes_from"]
        assert came == {"node": 0, "cluster": 0, "mirror": self.size}, came
        self.cpu.append((self.agent.cpu_seconds - before) / (self.size / 1e9))
        self.rates.append(self.size / 1e9 / services.seconds_of(stage))
        self.agent.unstage(stage)
        return Path(stage["mounts"][0]["path"])

    def evict(self) -> None:
        self.mirror.evict_agents()


@contextlib.contextmanager
def prepared(size: int, files: int = FILES) -> Iterator[tuple[Ours, s3_origin.Origin, Path]]:
    """Our services with content, the server that it came from, and a folder on the same disk."""
    with (
        tempfile.TemporaryDirectory() as name,
        s3_origin.serving({PREFIX: (files, size)}) as origin,
        services.mirror(Path(name) / "mirror", AWS_ENDPOINT_URL_S3=origin.url) as mirror,
        services.agent(Path(name) / "agent", mirror.url) as agent,
    ):
        ready = mirror.ready(f"s3://{s3_origin.BUCKET}/{PREFIX}/")
        yield Ours(mirror, agent, ready["grant"], files * size), origin, Path(name) / "others"


def measure() -> list[Row]:
    """Ours and the disk, in turn."""
    disk: list[float] = []
    with prepared(scaled_size(SIZE)) as (ours, origin, others):
        shutil.rmtree(origin.bucket)  # nobody reads from it any more
        for _ in range(RUNS):
            ours.stage()
            ours.evict()
            if not fio.missing():
                others.mkdir()
                disk.append(fio.write(others, FILES, ours.size // FILES, IN_FLIGHT))
                shutil.rmtree(others)
        peak = ours.agent.peak_megabytes
    title = f"{FILES} x {ours.size // FILES // 1024**2} MiB"
    return [
        Figure(f"{title}: cold stage", "GB/s", tuple(ours.rates)),
        *_against("fio's direct write", title, ours.rates, disk, fio.missing(), ">= 0.90"),
        Figure(f"{title}: CPU of the agent", "s/GB", tuple(ours.cpu), "<= 0.8"),
        Figure(f"{title}: memory of the agent", "MB", (peak,), "<= 1074"),
    ]


def measure_peers() -> list[Row]:
    """Ours and each of the others, in turn."""
    rates: dict[peers.Peer, list[float]] = {peer: [] for peer in ASKED}
    missing = {peer: peer.missing() for peer in ASKED}
    with prepared(scaled_size(SIZE)) as (ours, origin, others):
        for run in range(RUNS):
            ours.stage()
            ours.evict()
            for peer in ASKED:
                if not missing[peer]:
                    page_cache.keep(page_cache.files_below(origin.folder(PREFIX)))
                    rates[peer].append(ours.size / 1e9 / peer.fetch(origin, PREFIX, others))
                    peers.check(origin, PREFIX, others, content=run == 0)
                    shutil.rmtree(others)
                    os.sync()
    title = f"{FILES} x {ours.size // FILES // 1024**2} MiB"
    rows: list[Row] = [Figure(f"{title}: cold stage", "GB/s", tuple(ours.rates))]
    for peer, asked in ASKED.items():
        rows += _against(peer.name, title, ours.rates, rates[peer], missing[peer], asked)
    return rows


def _against(name: str, title: str, ours: list[float], theirs: list[float], missing: str, asked: str) -> list[Row]:
    if missing:
        return [Missing(f"{title}: {name}", missing, asked)]
    return [
        Figure(f"{title}: {name}", "GB/s", tuple(theirs)),
        Figure(f"{title}: ratio to {name}, pair by pair", "x", ratios(ours, theirs), asked),
    ]

