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
import io
import json
import math
import os
import re
import signal
import tempfile
import time
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Final

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.manifest import Root, files_of
from tests.architecture import recorder
from tests.architecture.recorder import PACKAGES
from tests.doubles.hub import Hub
from tests.support.services import services
from tests.support.services.commands import Process, wait_until

_VALUE_BASES: Final = ("Model", "Enum", "Error", "Exception", "Protocol", "NamedTuple", "TypedDict")
_SHORT: Final = 12
_LEFT_OUT: Final = ("settings", "metrics")
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


# The words.

# What the reader of a sentence should not have to work out. Counted in docstrings, comments and strings of the product.
PATTERNS: Final = {
    "subjects without a name": r"\b(?:who|whoever|nobody|everybody|somebody)\b",
    "that of, those of": r"\b(?:that|those) of\b",
    "told, hears, believes": r"\b(?:tells?|told|hears?|heard|believe[sd]?)\b",
    "stands, lies, rests, brings": r"\b(?:stands?|stood|lies|lay|rests?|brings?|brought)\b",
    "is no": r"(?<!there )\b(?:is|are) no\b(?! (?:longer|more|fewer|less)\b)",
}


@dataclass(frozen=True)
class Sentence:
    """A docstring, a comment or a string, and where it begins."""

    place: str
    text: str
    is_docstring: bool = False


def sentences(root: Path, files: Iterable[Path]) -> Iterator[Sentence]:
    """All that people read in these files."""
    for path in files:
        source = (root / path).read_text()
        docstrings = set[int]()
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text, first = ast.get_docstring(node), node.body[:1]
                if text is not None and isinstance(first[0], ast.Expr):
                    docstrings.add(id(first[0].value))
                    yield Sentence(f"{path}:{first[0].lineno}", text, is_docstring=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield Sentence(f"{path}:{node.lineno}", node.value)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield Sentence(f"{path}:{token.start[0]}", token.string)


def words(root: Path, files: Iterable[Path]) -> dict[str, list[str]]:
    """Where each pattern occurs, as often as it does, and the docstrings that are too short to say more than the name."""
    found: dict[str, list[str]] = {name: [] for name in (*PATTERNS, "docstrings of 7 words")}
    for sentence in sentences(root, files):
        for name, pattern in PATTERNS.items():
            found[name] += [sentence.place] * len(re.findall(pattern, sentence.text, re.IGNORECASE))
        if sentence.is_docstring and len(sentence.text.split()) <= 7:
            found["docstrings of 7 words"].append(sentence.place)
    return found


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


class Recorded:
    """A program of the checkout under the recorder."""

    def __init__(self, root: Path, folder: Path, script: str, *arguments: str) -> None:
        entry = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"][script]
        self._noted = folder / f"{script}.json"
        self.command = ("python", "-u", recorder.__file__, str(self._noted), entry, script, *arguments)

    def signal(self, process: Process, number: signal.Signals) -> dict[str, Any]:
        """Begin to note, or end; what was noted."""
        self._noted.unlink(missing_ok=True)
        process.send_signal(number)
        wait_until(self._noted.exists, what="the service's answer to the signal")
        return dict(json.loads(self._noted.read_text()))


class Journeys:
    """The three journeys through a mirror and a node."""

    def __init__(self, root: Path, folder: Path, hub: Hub) -> None:
        self._folder, self._hub = folder, hub
        self._environment = {"PYTHONPATH": str(root)}
        self._bdn = Recorded(root, folder, "bdn", "serve")
        self._node_agent = Recorded(root, folder, "bdn-node-agent")

    def files(self) -> dict[str, set[str]]:
        """Each journey, with the files that took part in every run of it but the first."""
        found: dict[str, list[set[str]]] = {"mirror": [], "chunk": [], "eviction": []}
        off = {"BDN_SCRUB_SECONDS": "0", "BDN_COLLECT_SECONDS": "0", "HF_ENDPOINT": self._hub.url}
        with services.mirror(self._folder / "mirror", None, self._bdn.command, **off, **self._environment) as mirror:
            mirrored = []
            for turn in range(RUNS):
                source = self._commit(turn)
                with self._noted(mirror.process) as noted:
                    mirrored.append(mirror.ready(source))
                found["mirror"].append(noted.files())
            off = {"BDN_AGENT_CLUSTER_CACHE_BYTES": "0", "BDN_AGENT_SCRUB_SECONDS": "0"}
            place, command = self._folder / "node", self._node_agent.command
            with services.agent(place, mirror.url, None, command, **off, **self._environment) as agent:
                for document in mirrored:
                    self._bring_and_evict(mirror, agent, document, found)
        return {name: set.intersection(*runs[1:]) for name, runs in found.items()}

    def _bring_and_evict(
        self, mirror: services.Mirror, agent: services.Agent, document: Any, found: dict[str, list[set[str]]]
    ) -> None:
        manifest = document["sources"][0]["manifest"]
        root = Root.parse(mirror.http.get(f"/manifests/{manifest}").content)
        (file,) = files_of(mirror.http.get(f"/chunks/{page.digest}").content for page in root.pages)
        name = file.digest.hex
        with self._noted(mirror.process, agent.process) as noted:
            stage = agent.stage(document["grant"], "job")
        times = [at for path, at in noted.named if name in path]
        found["chunk"].append(noted.files(start=min(times), end=max(times)))
        agent.unstage(stage)
        time.sleep(2)  # what a released stage leaves to be done, and the heartbeat that tells of it
        with self._noted(mirror.process, agent.process) as noted:
            request = {"manifest": manifest, "tier": "node"}
            answer = mirror.http.post("/evictions", params={"wait": 60}, json=request).raise_for_status().json()
            assert answer["status"] == "DONE", answer
        found["eviction"].append(noted.files(end=max(noted.unlinked)))

    @contextmanager
    def _noted(self, *processes: Process) -> Iterator[Noted]:
        """What the services note in the block, the mirror first; it is there when the block has ended."""
        recorded = list(zip((self._bdn, self._node_agent), processes, strict=False))
        for one, process in recorded:
            one.signal(process, signal.SIGUSR1)
        noted = Noted([], [], [])
        yield noted
        end = recorder.now()
        for one, process in recorded:
            document = one.signal(process, signal.SIGUSR2)
            noted.calls.extend((file, at) for file, at in document["calls"] if at <= end)
            noted.named.extend((path, at) for path, at in document["named"])
            noted.unlinked.extend(document["unlinked"])

    def _commit(self, turn: int) -> str:
        self._hub.repo(f"org/model-{turn}").commit({"weights": os.urandom(4 * CHUNK_SIZE)})
        return f"hf://org/model-{turn}"


def hops(root: Path) -> dict[str, list[str]]:
    """The files of each journey, relative to the root."""
    with Hub() as hub, tempfile.TemporaryDirectory(prefix="bdn-measure-") as folder:
        found = Journeys(root, Path(folder), hub).files()
    return {
        name: sorted(str(Path(file).relative_to(root)) for file in files if not is_of_values(Path(file)))
        for name, files in found.items()
    }


def measured(root: Path, *, with_journeys: bool = True) -> dict[str, Any]:
    files = product_files(root)
    imports = own_imports(root, files)
    counts = sorted(map(len, imports.values()))
    tests = [path.relative_to(root) for path in (root / "tests").rglob("*.py")]
    rings = circles(imports)
    journeys = hops(root) if with_journeys else {}
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
        **{f"words: {name}": found for name, found in words(root, files).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--json", action="store_true", help="everything, with names, as JSON")
    parser.add_argument("--still", action="store_true", help="without the journeys, which run both services")
    parser.add_argument("--files", action="store_true", help="name what is counted")
    options = parser.parse_args()
    found = measured(options.root.resolve(), with_journeys=not options.still)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name:<36}{len(value) if isinstance(value, list) else value:>8,}")
        for one in value if options.files and isinstance(value, list) else ():
            print(f"    {' '.join(one) if isinstance(one, list) else one}")


if __name__ == "__main__":
    main()
