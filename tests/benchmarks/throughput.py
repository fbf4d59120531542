"""How fast the mirror takes objects in, beside s5cmd."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import httpx2

from tests.benchmarks import s3_origin
from tests.benchmarks.report import Figure
from tests.support.commands import Shell, wait_until

INTRODUCTION = """
`POST /mirror` to READY of a fresh mirror (`bdn serve`, all defaults), in turn with `s5cmd cp` of the same objects to the same
disk, from the same server: nginx with ranges and a fixed listing, its files in the page cache. The mirror checks every object
against its CRC64NVME, names every chunk by its BLAKE3, syncs every chunk, and writes its database; s5cmd checks nothing, and
`sync -f` of its folder is counted in (*s5cmd* alone, without it, is printed beside). `BDN_BENCH_SCALE` makes everything
smaller (1).
"""
RUNS = 5
CASES = {"large": (4, 2 * 1024**3), "small": (20_000, 32 * 1024)}


def measure() -> list[Figure]:
    """Large files and small ones."""
    scale = float(os.environ.get("BDN_BENCH_SCALE", "1"))
    cases = {
        name: (count, int(size * scale)) if count < 100 else (int(count * scale), size)
        for name, (count, size) in CASES.items()
    }
    figures: list[Figure] = []
    with s3_origin.serving(cases) as origin:
        for name, (count, size) in cases.items():
            ours, theirs, unsynced = [], [], []
            for _ in range(RUNS):
                ours.append(_mirror(origin.url, name, count * size))
                synced, alone = _s5cmd(origin.url, name, count)
                theirs.append(synced)
                unsynced.append(alone)
            gigabytes = count * size / 1e9
            title = f"{count} x {size // 1024} KiB"
            ratios = tuple(their / our for our, their in zip(ours, theirs, strict=True))
            figures += [
                Figure(f"{title}: mirror", "GB/s", tuple(gigabytes / seconds for seconds in ours)),
                Figure(f"{title}: s5cmd and sync", "GB/s", tuple(gigabytes / seconds for seconds in theirs)),
                Figure(f"{title}: s5cmd", "GB/s", tuple(gigabytes / seconds for seconds in unsynced)),
                Figure(f"{title}: ratio, pair by pair", "x", ratios, ">= 2.0"),
                Figure(
                    f"{title}: ratio to s5cmd without sync",
                    "x",
                    tuple(their / our for our, their in zip(ours, unsynced, strict=True)),
                ),
            ]
    return figures


def _mirror(origin: str, folder: str, size: int) -> float:
    with tempfile.TemporaryDirectory() as name:
        environment = {
            "AWS_ENDPOINT_URL_S3": origin,
            "BDN_EGRESS_ALLOW": "127.0.0.1",
            "BDN_PORT": "18460",
            "BDN_DATA_PORT": "18461",
        }
        shell = Shell(Path(name), environment)
        with shell.running("bdn", "serve"), httpx2.Client(base_url="http://127.0.0.1:18460", timeout=600) as client:
            wait_until(lambda: _is_ready(client), what="the mirror")
            began = time.perf_counter()
            body = {"weights": [{"source": f"s3://{s3_origin.BUCKET}/{folder}/", "mount_location": "/weights"}]}
            mirror = client.post("/mirror", json=body).raise_for_status().json()
            while mirror["status"] in {"PENDING", "SYNCING"}:
                mirror = client.get(f"/mirror/{mirror['id']}?wait=60").raise_for_status().json()
            seconds = time.perf_counter() - began
            assert (mirror["status"], mirror["bytes_transferred"]) == ("READY", size), mirror
    return seconds


def _is_ready(client: httpx2.Client) -> bool:
    try:
        return client.get("/readyz").is_success
    except httpx2.TransportError:
        return False


def _s5cmd(origin: str, folder: str, count: int) -> tuple[float, float]:
    s5cmd = Path(__file__).parents[2] / ".venv-peers/bin/s5cmd"
    with tempfile.TemporaryDirectory() as name:
        environment = {**os.environ, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        began = time.perf_counter()
        subprocess.run(
            [s5cmd, "--endpoint-url", origin, "cp", f"s3://{s3_origin.BUCKET}/{folder}/*", f"{name}/"],
            env=environment,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        alone = time.perf_counter() - began
        subprocess.run(["sync", "-f", name], check=True)
        seconds = time.perf_counter() - began
        assert len(list(Path(name).iterdir())) == count
        shutil.rmtree(name)
        Path(name).mkdir()
    return seconds, alone
