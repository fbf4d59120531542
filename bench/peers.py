"""The others: programs that bring files to a disk, each with its own way of being asked for several large ones."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.nginx import Origin

VENV = Path(__file__).parents[1] / ".venv-peers"
_TRUSS_MANIFEST = Path("/static-bptr/static-bptr-manifest.json")  # the only place where it looks and nobody else does
LONGEST_SECONDS = 300
_KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
_TRUSS = "import sys, truss_transfer; truss_transfer.lazy_data_resolve(sys.argv[1])"
# As huggingface_hub calls it, for all files at once.
_HF_TRANSFER = """
import sys, hf_transfer
from concurrent.futures import ThreadPoolExecutor
def get(url):
    hf_transfer.download(url=url, filename=sys.argv[1] + url[url.rindex("/"):], max_files=100,
                         chunk_size=10 * 1024**2, parallel_failures=3, max_retries=5)
with ThreadPoolExecutor(8) as threads:
    list(threads.map(get, sys.argv[2:]))
"""


@dataclass(frozen=True)
class Peer:
    """A program, the part of it that must be there, and how it is asked for everything below a prefix."""

    name: str
    needs: str
    run: Callable[[Origin, str, Path], None]

    def missing(self) -> str:
        """Why it cannot run; empty when it can."""
        if self.needs.startswith("import "):
            found = _python(self.needs, check=False) == 0
        else:
            found = _find(self.needs) is not None
        return "" if found else f"{self.name} is not installed; `make bench` installs what can be had"

    def fetch(self, origin: Origin, prefix: str, target: Path) -> float:
        """Seconds from the start of the program until its files are on the disk. ``target`` must not be there yet."""
        target.mkdir()
        began = time.perf_counter()
        self.run(origin, prefix, target)
        subprocess.run(["sync", "-f", target], check=True)
        return time.perf_counter() - began


def check(source: Path, target: Path, *, content: bool) -> None:
    """That everything came: the sizes, and on demand every byte."""
    for path in source.iterdir():
        copy = target / path.name
        assert copy.stat().st_size == path.stat().st_size, copy
        if content:
            subprocess.run(["cmp", path, copy], check=True)


def _urls(origin: Origin, prefix: str) -> list[str]:
    return [
        f"{origin.url}/{origin.bucket.name}/{prefix}/{path.name}" for path in sorted(origin.folder(prefix).iterdir())
    ]


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{VENV / 'bin'}:{os.environ['PATH']}")


def _call(command: Sequence[str | Path], **environment: str) -> None:
    done = subprocess.run(
        [_find(str(command[0])) or command[0], *command[1:]],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def _python(script: str, *arguments: str | Path, check: bool = True) -> int:
    python = VENV / "bin/python"
    if not python.exists():
        return 1
    done = subprocess.run(
        [python, "-c", script, *arguments], capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False
    )
    assert not check or done.returncode == 0, done.stderr[-2000:]
    return done.returncode


def _s5cmd(origin: Origin, prefix: str, target: Path) -> None:
    _call(["s5cmd", "--endpoint-url", origin.url, "cp", f"s3://{origin.bucket.name}/{prefix}/*", f"{target}/"], **_KEYS)


def upload(server_url: str, folder: Path, bucket: str, prefix: str) -> float:
    """Seconds that s5cmd takes for all files of a folder."""
    began = time.perf_counter()
    _call(["s5cmd", "--endpoint-url", server_url, "cp", f"{folder}/", f"s3://{bucket}/{prefix}/"], **_KEYS)
    return time.perf_counter() - began


def _aria2c(origin: Origin, prefix: str, target: Path) -> None:
    options = ["-q", "-j4", "-x8", "-s8", "-k8M", "--file-allocation=falloc", "--no-conf", f"--dir={target}"]
    _call(["aria2c", *options, "-Z", *_urls(origin, prefix)])


def _rclone(origin: Origin, prefix: str, target: Path) -> None:
    remote = (
        f":s3,provider=Other,env_auth=true,force_path_style=true,endpoint='{origin.url}':{origin.bucket.name}/{prefix}"
    )
    options = ["--config", "/dev/null", "--transfers=4", "--multi-thread-streams=4", "--checkers=4", "--s3-no-head"]
    _call(["rclone", "copy", *options, remote, target], **_KEYS)


def _hf_transfer(origin: Origin, prefix: str, target: Path) -> None:
    _python(_HF_TRANSFER, target, *_urls(origin, prefix))


def _truss_transfer(origin: Origin, prefix: str, target: Path) -> None:
    pointers = [
        {
            "resolution": {"resolution_type": "http", "url": url, "expiration_timestamp": 4_000_000_000},
            "uid": path.name,
            "file_name": path.name,
            "hashtype": "etag",
            "hash": path.name,
            "size": path.stat().st_size,
        }
        for url, path in zip(_urls(origin, prefix), sorted(origin.folder(prefix).iterdir()), strict=True)
    ]
    _TRUSS_MANIFEST.parent.mkdir()  # refuses when somebody's own is there
    try:
        _TRUSS_MANIFEST.write_text(json.dumps({"pointers": pointers}))
        _python(_TRUSS, target)
    finally:
        shutil.rmtree(_TRUSS_MANIFEST.parent)


TRUSS_TRANSFER = Peer("truss-transfer", "import truss_transfer", _truss_transfer)
S5CMD = Peer("s5cmd", "s5cmd", _s5cmd)
ARIA2C = Peer("aria2c", "aria2c", _aria2c)
HF_TRANSFER = Peer("hf_transfer", "import hf_transfer", _hf_transfer)
RCLONE = Peer("rclone", "rclone", _rclone)
