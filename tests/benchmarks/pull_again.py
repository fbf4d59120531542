"""How soon a source that is held already is ready again."""

import os
import tempfile
import time
from pathlib import Path

from tests.benchmarks.report import FEW_RUNS, Figure
from tests.doubles.hub import Hub
from tests.support.services.commands import Shell


def measure() -> list[Figure]:
    """For small, medium and large repositories."""
    figures: list[Figure] = []
    for count in (50, 1000, 5000):
        with Hub() as hub, tempfile.TemporaryDirectory() as folder:
            hub.repo("org/model").commit({f"d{n % 20}/file-{n}.json": os.urandom(300) for n in range(count)})
            shell = Shell(Path(folder), {"HF_ENDPOINT": hub.url})
            first = shell.run("bdn", "pull", "hf://org/model", "out", "--json")
            assert first.code == 0, first.err
            hub.log.clear()
            allowed = f"< {0.1 + count / 50 / 1000:.2f} s"
            for title, target in (("the same directory", "out"), ("a new directory", "out-{n}")):
                ready, process = [], []
                for n in range(FEW_RUNS):
                    began = time.perf_counter()
                    done = shell.run("bdn", "pull", "hf://org/model", target.format(n=n), "--json")
                    process.append(time.perf_counter() - began)
                    assert done.code == 0, done.err
                    assert (done.document["bytes_transferred"], hub.log.bytes_served("/resolve/")) == (0, 0)
                    ready.append(done.document["seconds"])
                figures.append(Figure(f"{count} files, {title}: ready", "s", ready, allowed))
                figures.append(Figure(f"{count} files, {title}: process", "s", process))
    return figures
