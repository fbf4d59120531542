"""How large the house is, and how many files one opens to follow a journey: ``python -m tests.architecture.measure [--json]``.

``--root CHECKOUT`` measures another commit with the same rules. ``--files`` names the files of each journey. A *product file* is a
non-empty ``.py`` file below ``bdn``, ``node_agent`` or ``migrations``; *own imports* are the product modules that it names.

The *hops* of a journey are the product files in which a function runs on the way, found by running it: both services run in
processes of their own under a profiler, on loopback, with scrub and collection off. A file counts if a function of it is called or
resumed between the two moments in each of five runs but the first, which opens and loads what stays:

- mirror: ``POST /mirror`` is sent (one Hugging Face repository, one file of four chunks, no agent); its answer READY is read.
- chunk: the agent makes the file that its stage fills, named after the digest; the whole file gets its place in the cache.
- eviction: ``POST /evictions`` of that manifest on all nodes is sent to the mirror; the agent unlinks the file.

Not counted, because nobody opens them to follow the way: module bodies; special methods; settings; metrics; files of values alone,
where every class is a frozen dataclass, model, enumeration, error, protocol or named tuple and no function waits or has more than
twelve lines.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import math
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import httpx2

PACKAGES: Final = ("bdn", "node_agent", "migrations")
CHUNK: Final = 8 * 1024 * 1024
_IS_FUNCTION: Final = 1  # CO_OPTIMIZED: the body of a function, not of a module or class
_VALUE_BASES: Final = ("Model", "Enum", "Error", "Exception", "Protocol", "NamedTuple", "TypedDict")
_SHORT: Final = 12
_LEFT_OUT: Final = ("settings", "metrics")
_LONGEST_SECONDS: Final = 60
RUNS: Final = 5


# What stands in the files.


def product_files(root: Path) -> list[Path]:
    """Relative to the root."""
    found = (path for package in PACKAGES for path in (root / package).rglob("*.py"))
    return sorted(path.relative_to(root) for path in found if path.read_bytes().strip())


def lines(root: Path, files: Iterable[Path]) -> int:
    return sum(len((root / path).read_bytes().splitlines()) for path in files)


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def own_imports(root: Path, files: list[Path]) -> dict[str, set[str]]:
    """The product modules that each product module names, itself left out."""
    modules = {module_of(path) for path in files}
    found: dict[str, set[str]] = {}
    for path in files:
        names = set()
        for node in ast.walk(ast.parse((root / path).read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= whole & modules or {node.module}
        found[module_of(path)] = (names & modules) - {module_of(path)}
    return found


def class_names_used_twice(root: Path, files: list[Path]) -> list[str]:
    names = Counter(
        node.name
        for path in files
        for node in ast.parse((root / path).read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Of each folder one set of siblings that import each other in a ring, if any; folders end in a slash."""
    between: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for importer, imported in imports.items():
        for other in imported:
            ours, theirs = importer.split("."), other.split(".")
            shared = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            if shared:  # below one package
                parent = ".".join(ours[:shared])
                one, two = (f"{name[shared]}{'/' if len(name) > shared + 1 else ''}" for name in (ours, theirs))
                between[parent][one].add(two)
    found = []
    for parent, graph in between.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            found.append(sorted({f"{parent}.{one}" for one in error.args[1]}))
    return found


def is_of_values(path: Path) -> bool:
    """Whether a file holds values alone, by the rule of this module's docstring."""
    if path.stem in _LEFT_OUT or any(part in _LEFT_OUT for part in path.parts):
        return True
    tree = ast.parse(path.read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return all(map(_is_value, classes)) and not any(map(_does_much, functions))


def _is_value(node: ast.ClassDef) -> bool:
    bases = (ast.unparse(base).split("[")[0] for base in node.bases)
    is_frozen = any(re.match(r"dataclass\(.*frozen=True", ast.unparse(one)) for one in node.decorator_list)
    return is_frozen or any(base.endswith(_VALUE_BASES) for base in bases)


def _does_much(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """It waits, or is longer than a formula."""
    return isinstance(node, ast.AsyncFunctionDef) or (node.end_lineno or 0) - node.body[0].lineno >= _SHORT


# What runs: one process of a service, which notes its calls between two signals.


class Recorder:
    """Notes in which thousandths of a second functions of each product file ran, and when files got names and were unlinked."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._is_on = False
        self._calls: set[tuple[str, int]] = set()
        self._named: list[tuple[str, int]] = []
        self._unlinked: list[int] = []
        self._watched: dict[CodeType, str | None] = {}

    def start(self) -> None:
        """From now on, in this thread and in those to come."""
        signal.signal(signal.SIGUSR1, self._begin)
        signal.signal(signal.SIGUSR2, self._end)
        sys.addaudithook(self._hear)
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if self._is_on and event == "call":
            code = frame.f_code
            if code not in self._watched:
                self._watched[code] = self._file_of(code)
            if file := self._watched[code]:
                self._calls.add((file, now()))

    @staticmethod
    def _file_of(code: CodeType) -> str | None:
        is_way = code.co_flags & _IS_FUNCTION and not re.fullmatch("__.*__", code.co_name)
        path = Path(code.co_filename)
        return str(path) if is_way and any(package in path.parts for package in PACKAGES) else None

    def _hear(self, event: str, given: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event == "os.remove":
            self._unlinked.append(now())
        elif event == "os.rename" or (event == "open" and given[2] & os.O_CREAT):
            self._named.append((str(given[0]), now()))

    def _begin(self, *_: object) -> None:
        self._calls, self._named, self._unlinked, self._is_on = set(), [], [], True
        self._tell({})

    def _end(self, *_: object) -> None:
        self._is_on = False
        self._tell({"calls": sorted(self._calls), "named": self._named, "unlinked": self._unlinked})

    def _tell(self, document: dict[str, Any]) -> None:
        part = self._out.with_suffix(".part")
        part.write_text(json.dumps(document))
        part.rename(self._out)


def now() -> int:
    """Thousandths of a second, the same in all processes."""
    return time.monotonic_ns() // 1_000_000


class Service:
    """A program of the product in a process of its own, whose calls are noted on demand."""

    def __init__(self, root: Path, folder: Path, script: str, *arguments: str, **environment: str) -> None:
        folder.mkdir()
        self.noted = folder / "noted.json"
        entry = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"][script]
        command = [sys.executable, __file__, "--run", str(self.noted), entry, script, *arguments]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("BDN_", "HF_", "AWS_"))}
        own = {"PYTHONPATH": str(root), "HOME": str(folder), "BDN_DATA_DIR": str(folder / "data"), **environment}
        self.log = folder / "log"
        with self.log.open("w") as sink:
            self.process = subprocess.Popen(command, env=kept | own, cwd=folder, stdout=sink, stderr=sink)

    def signal(self, number: signal.Signals) -> dict[str, Any]:
        """Begin to note, or end; what was noted."""
        self.noted.unlink(missing_ok=True)
        self.process.send_signal(number)
        until(self.noted.exists, "a service to hear the signal")
        return dict(json.loads(self.noted.read_text()))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(_LONGEST_SECONDS)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + _LONGEST_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"waited in vain for {what}")
        time.sleep(0.002)


def run_service(out: str, entry: str, script: str, *arguments: str) -> None:
    """The child's side: the program behind a script of pyproject.toml, under the recorder."""
    sys.path.remove(str(Path(__file__).parent))
    recorder = Recorder(Path(out))
    sys.argv = [script, *arguments]
    module, _, function = entry.partition(":")
    recorder.start()
    program = runpy.run_module(module, alter_sys=False)
    sys.exit(program[function]())


# The journeys.


@dataclass(frozen=True)
class Noted:
    """What happened in services on the way, and when: calls, files that got a name (by their first), files that were unlinked."""

    calls: list[tuple[str, int]]
    named: list[tuple[str, int]]
    unlinked: list[int]

    def files(self, start: float = 0, end: float = math.inf) -> set[str]:
        """Where functions ran."""
        return {file for file, at in self.calls if start <= at <= end}


class Cluster:
    """A mirror and a node, and the three journeys through them."""

    def __init__(self, root: Path, folder: Path, hub: Any) -> None:
        self._root, self._folder, self._hub = root, folder, hub
        port, data_port = free_port(), free_port()
        self._url = f"http://127.0.0.1:{port}"
        places = {"BDN_PORT": str(port), "BDN_DATA_PORT": str(data_port), "HF_ENDPOINT": hub.url}
        allowed = {"BDN_EGRESS_ALLOW": "127.0.0.0/8,::1", "BDN_SCRUB_SECONDS": "0", "BDN_COLLECT_SECONDS": "0"}
        self._mirror = Service(root, folder / "mirror", "bdn", "serve", **places, **allowed)
        self._agent: Service | None = None
        self._api = httpx2.Client(base_url=self._url, timeout=_LONGEST_SECONDS, trust_env=False)
        until(lambda: answers(self._api), "the mirror")
        socket_of_agent = str(folder / "node/data/agent.sock")
        self._node = httpx2.Client(
            transport=httpx2.HTTPTransport(uds=socket_of_agent), base_url="http://agent", timeout=_LONGEST_SECONDS
        )

    def close(self) -> None:
        for client in (self._node, self._api):
            client.close()
        for service in (self._agent, self._mirror):
            if service:
                service.stop()

    def journeys(self) -> dict[str, set[str]]:
        """Each journey, with the files that took part in every run of it but the first."""
        mirrored = [self._noted(partial(self._mirror_one, self._commit(turn)), self._mirror) for turn in range(RUNS)]
        self._agent = self._start_agent()
        found = {"mirror": [noted.files() for _, noted in mirrored], "chunk": [], "eviction": []}
        for mirror, _ in mirrored:
            manifest = mirror["sources"][0]["manifest"]
            (file,) = self._api.get(f"/manifests/{manifest}").json()["files"]
            name = file["digest"].removeprefix("b3:")
            stage, noted = self._noted(partial(self._stage, mirror["grant"]), self._mirror, self._agent)
            times = [at for path, at in noted.named if name in path]
            found["chunk"].append(noted.files(start=min(times), end=max(times)))
            self._node.delete(f"/stages/{stage}").raise_for_status()
            time.sleep(2)  # what a released stage leaves to be done, and the heartbeat that tells of it
            _, noted = self._noted(partial(self._evict, manifest), self._mirror, self._agent)
            found["eviction"].append(noted.files(end=max(noted.unlinked)))
        return {name: set.intersection(*runs[1:]) for name, runs in found.items()}

    @staticmethod
    def _noted(journey: Callable[[], Any], *services: Service) -> tuple[Any, Noted]:
        """Go, and what the services noted meanwhile."""
        for service in services:
            service.signal(signal.SIGUSR1)
        result = journey()
        end = now()
        documents = [service.signal(signal.SIGUSR2) for service in services]
        return result, Noted(
            [(file, at) for one in documents for file, at in one["calls"] if at <= end],
            [(path, at) for one in documents for path, at in one["named"]],
            [at for one in documents for at in one["unlinked"]],
        )

    def _commit(self, turn: int) -> str:
        self._hub.repo(f"org/model-{turn}").commit({"weights": os.urandom(4 * CHUNK)})
        return f"hf://org/model-{turn}"

    def _mirror_one(self, source: str) -> dict[str, Any]:
        document = self._api.post("/mirror", json={"weights": [{"source": source, "mount_location": "/w"}]}).json()
        while document["status"] in {"PENDING", "SYNCING"}:
            document = self._api.get(f"/mirror/{document['id']}", params={"wait": 60}).json()
        if document["status"] != "READY":
            sys.exit(f"not mirrored: {document}")
        return dict(document)

    def _start_agent(self) -> Service:
        agent = Service(
            self._root,
            self._folder / "node",
            "bdn-node-agent",
            BDN_URL=self._url,
            BDN_AGENT_NODE="node",
            BDN_AGENT_DATA_PORT="0",
            BDN_AGENT_EXPOSURE="none",
            BDN_AGENT_HEADROOM_BYTES="0",
            BDN_AGENT_CLUSTER_CACHE_BYTES="0",
            BDN_AGENT_SCRUB_SECONDS="0",
        )
        until(lambda: answers(self._node), "the agent")
        until(lambda: '"node"' in self._api.get("/agents").text, "the heartbeat")
        return agent

    def _stage(self, grant: str) -> str:
        """Stage until READY; the stage's name."""
        document = self._node.post("/stages", json={"job_id": "job", "grant": grant}).raise_for_status().json()
        while document["state"] in {"PENDING", "STAGING"}:
            document = self._node.get(f"/stages/{document['id']}", params={"wait": 60}).json()
        if document["state"] != "READY":
            sys.exit(f"not staged: {document}")
        return str(document["id"])

    def _evict(self, manifest: str) -> None:
        request = {"manifest": manifest, "tier": "node"}
        answer = self._api.post("/evictions", params={"wait": 60}, json=request).raise_for_status().json()
        if answer["status"] != "DONE":
            sys.exit(f"not evicted: {answer}")


def answers(client: httpx2.Client) -> bool:
    with contextlib.suppress(httpx2.TransportError):
        return client.get("/readyz").is_success
    return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def hops(root: Path) -> dict[str, list[str]]:
    """The files of each journey, relative to the root."""
    sys.path.insert(0, str(root))
    from tests.doubles.hub import Hub

    with Hub() as hub, tempfile.TemporaryDirectory(prefix="bdn-measure-") as folder:
        cluster = Cluster(root, Path(folder), hub)
        try:
            found = cluster.journeys()
        finally:
            cluster.close()
    return {
        name: sorted(str(Path(file).relative_to(root)) for file in files if not is_of_values(Path(file)))
        for name, files in found.items()
    }


def measured(root: Path) -> dict[str, Any]:
    files = product_files(root)
    imports = own_imports(root, files)
    counts = sorted(map(len, imports.values()))
    tests = [path.relative_to(root) for path in (root / "tests").rglob("*.py")]
    rings = circles(imports)
    journeys = hops(root)
    return {
        "product files": len(files),
        "product lines": lines(root, files),
        "test lines": lines(root, tests),
        "own imports p50": counts[len(counts) // 2],
        "own imports p90": counts[len(counts) * 9 // 10],
        "own imports max": counts[-1],
        "class names used twice": class_names_used_twice(root, files),
        "circles of siblings": rings,
        "circles of folders": [ring for ring in rings if any(name.endswith("/") for name in ring)],
        **{f"hops: {name}": found for name, found in sorted(journeys.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--json", action="store_true", help="everything, with names, as JSON")
    parser.add_argument("--files", action="store_true", help="name what is counted")
    options = parser.parse_args()
    found = measured(options.root.resolve())
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name:<24}{len(value) if isinstance(value, list) else value:>8,}")
        for one in value if options.files and isinstance(value, list) else ():
            print(f"    {' '.join(one) if isinstance(one, list) else one}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run_service(*sys.argv[2:])
    else:
        main()
