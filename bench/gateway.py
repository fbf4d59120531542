"""The hub gateway beside nginx: the same repository for the same client, held by both."""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from bench import nginx
from bench.report import FEW_RUNS, Figure, Row, ratios, scaled_size
from tests.doubles.content import sha256_of
from tests.doubles.hub import Hub
from tests.doubles.hub_repository import Commit
from tests.support.network.egress import ALLOW_LOOPBACK
from tests.support.network.ports import free_port
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Shell
from tests.support.services.processes import cpu_seconds

_FILES: Final = 4
_SIZE: Final = 1024**3  # of all
_SERVER: Final = """
    root {root};
    location /api/ {{ default_type application/json; try_files $uri.json =404; }}
    location /org/model/resolve/ {{
        rewrite ^/org/model/resolve/[^/]+/(.*)$ /files/$1 break;
        add_header X-Repo-Commit {sha};
    }}
"""


def measure() -> list[Row]:
    """``hf download`` of a repository, in turn; every file is compared, and synced."""
    size = scaled_size(_SIZE)
    contents = {f"model-{number}.safetensors": os.urandom(size // _FILES) for number in range(_FILES)}
    ours, theirs, cpu, their_cpu = [], [], [], []
    with tempfile.TemporaryDirectory() as name, Hub() as hub, ExitStack() as stack:
        root = Path(name)
        repository = hub.repo("org/model")
        commit = repository.commits[repository.commit(contents)]
        shell, gateway, agent = stack.enter_context(_gateway(root / "cluster", hub.url))
        other = stack.enter_context(nginx.serving(_SERVER.format(root=_site(root / "site", commit), sha=commit.sha)))
        _download(shell, gateway, commit)  # brings it to the node
        for _ in range(FEW_RUNS):
            before = cpu_seconds(agent)
            ours.append(size / 1e9 / _download(shell, gateway, commit))
            cpu.append((cpu_seconds(agent) - before) / (size / 1024**3))
            before = _cpu_of_nginx()
            theirs.append(size / 1e9 / _download(shell, other, commit))
            their_cpu.append((_cpu_of_nginx() - before) / (size / 1024**3))
    return [
        Figure("hf download through the gateway, held", "GB/s", ours),
        Figure("hf download from nginx", "GB/s", theirs),
        Figure("ratio, pair by pair", "x", ratios(ours, theirs), ">= 0.95"),
        Figure("CPU of the agent", "s/GiB", cpu),
        Figure("CPU of nginx", "s/GiB", their_cpu),
    ]


@contextmanager
def _gateway(root: Path, hub: str) -> Iterator[tuple[Shell, str, int]]:
    """A shell of the node, the gateway's URL, and the agent's process."""
    root.mkdir()
    extra = {"BDN_EGRESS_ALLOW": ALLOW_LOOPBACK, "HF_ENDPOINT": hub, "BDN_GATEWAY_ORGANISATION": "default"}
    cluster, port = Cluster(root, extra, is_forked=False), free_port()
    shell = cluster.shell(BDN_AGENT_GATEWAY=f"127.0.0.1:{port}")
    shell.root.mkdir()
    with cluster.mirror(), shell.running("bdn-node-agent") as agent:
        cluster.await_agent(shell)
        yield shell, f"http://127.0.0.1:{port}", agent.pid


def _site(root: Path, commit: Commit) -> Path:
    """The files, and the hub's answers about them, as nginx serves them."""
    api, files = root / "api/models/org/model", root / "files"
    for folder in (api / "revision", api / "tree", files):
        folder.mkdir(parents=True)
    described: dict[str, Any] = {"id": "org/model", "sha": commit.sha, "private": False, "gated": False}
    described["siblings"] = [{"rfilename": path} for path in commit.files]
    for revision in ("main", commit.sha):
        (api / "revision" / f"{revision}.json").write_text(json.dumps(described))
        (api / "tree" / f"{revision}.json").write_text(json.dumps(commit.tree))
    for number, (path, file) in enumerate(commit.files.items()):
        assert isinstance(file.content, bytes)
        (files / path).write_bytes(file.content)
        os.utime(
            files / path, (number, number)
        )  # nginx's ETag is time and size, and the client's names of blobs are ETags
    return root


def _download(shell: Shell, endpoint: str, commit: Commit) -> float:
    """Seconds of the client and of the sync. The client is a program of its own, with a new cache."""
    cache = shell.root / "hub"
    hf = str(Path(sys.executable).with_name("hf"))
    began = time.perf_counter()
    done = shell.run(hf, "download", "org/model", HF_ENDPOINT=endpoint, HF_HUB_CACHE=str(cache), HF_HUB_DISABLE_XET="1")
    os.sync()
    seconds = time.perf_counter() - began
    assert done.code == 0, done.err
    for path, file in commit.files.items():
        found = (cache / "models--org--model/snapshots" / commit.sha / path).read_bytes()
        assert hashlib.sha256(found).hexdigest() == sha256_of(file.content)
    shutil.rmtree(cache)
    return seconds


def _cpu_of_nginx() -> float:
    """Of all its processes below this one."""
    parents = {os.getpid()}
    total = 0.0
    for pid in sorted(int(name.name) for name in Path("/proc").iterdir() if name.name.isdecimal()):
        try:
            told = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        if "(nginx)" in told and int(told.rpartition(")")[2].split()[1]) in parents:
            parents.add(pid)
            total += cpu_seconds(pid)
    return total
