"""Programs of frameworks, in the environment that ``make training`` makes, and what they say of the checkpoints that they write."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from tests.support.services.commands import ROOT, wait_until

LONGEST_SECONDS = 600
PYTHON = ROOT / ".venv-training/bin/python"
needs_frameworks = (
    pytest.mark.training,
    pytest.mark.skipif(
        not (ROOT / ".venv-training/.ready").exists(),
        reason="PyTorch, transformers and PEFT are not installed; make training installs them",
    ),
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")


@dataclass(frozen=True)
class Writer:
    """A program at work."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    @property
    def said(self) -> list[dict[str, Any]]:
        """Every line of JSON that it has finished; frameworks print what they like."""
        return [json.loads(line) for line in self.out.read_bytes().split(b"\n")[:-1] if line.startswith(b'{"')]

    def complete(self, name: str | None = None) -> list[dict[str, Any]]:
        """The states of checkpoints, or of one, that it says are complete."""
        return [one for one in self.said if "complete" in one and name in (None, one["complete"])]

    def has_ended(self) -> bool:
        """Raises where it failed."""
        code = self.process.poll()
        assert code in (None, 0), self.err.read_text()[-5000:]
        return code == 0

    def go_on(self) -> None:
        """From where it waits, or shall wait next."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def wait(self) -> list[dict[str, Any]]:
        """To its end; what it said."""
        wait_until(self.has_ended, seconds=LONGEST_SECONDS, what="the end of a writer")
        return self.said

    def kill(self) -> None:
        """It, and what it started, at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def writing(
    folder: Path, script: str, *arguments: object, launcher: Sequence[str] = (), **environment: str
) -> Iterator[Writer]:
    """``script`` of ``tests/support/training/writers``, until the block ends. Its home and its output are in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(PYTHON), *launcher, "-m", f"tests.support.training.writers.{script}", *map(str, arguments)]
    own = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # or ranks on few cores wait for each other
        "GLOO_SOCKET_IFNAME": "lo",
        **environment,
    }

    def opened(kind: str) -> IO[bytes]:
        return (folder / f"{script}.{kind}").open("wb")

    with opened("out") as out, opened("err") as err:
        process = subprocess.Popen(
            command, env=own, cwd=folder, stdin=subprocess.PIPE, stdout=out, stderr=err, start_new_session=True
        )
    writer = Writer(process, Path(out.name), Path(err.name))
    try:
        yield writer
    finally:
        writer.kill()
        assert process.stdin is not None
        process.stdin.close()


def loaded(folder: Path, way: str, checkpoints: Sequence[Path]) -> list[str]:
    """The states of the model that a framework loads from these."""
    with writing(folder, "loading", way, *checkpoints) as loader:
        return [one["state"] for one in loader.wait()]
