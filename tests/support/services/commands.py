"""The real commands in processes of their own, with an environment that knows nothing of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.network.egress import ALLOW_LOOPBACK

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(sys.executable).parent
LONGEST_SECONDS = 900


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """What ``--json`` printed."""
        return json.loads(self.out)


@dataclass(frozen=True)
class Shell:
    """Runs commands with a home and a data directory below ``root``; ``prefix`` may put them into another network."""

    root: Path
    extra: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        home = self.root / "home"
        home.mkdir(parents=True, exist_ok=True)
        return {
            "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
            "HOME": str(home),
            "PYTHONPATH": str(ROOT),  # this checkout's code, wherever the scripts were installed from
            "BDN_DATA_DIR": str(self.data),
            "BDN_EGRESS_ALLOW": ALLOW_LOOPBACK,
            **self.extra,
        }

    @property
    def data(self) -> Path:
        return self.root / "data"

    def run(self, *command: str, **environment: str) -> Finished:
        """To its end."""
        done = subprocess.run(
            [*self.prefix, str(SCRIPTS / command[0]), *command[1:]],
            env={**self.environment, **environment},
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=LONGEST_SECONDS,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    @contextlib.contextmanager
    def running(self, *command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
        """In the background, until the block ends; its output is in ``root/<command>.log``."""
        log = self.root / f"{command[0]}-{command[1] if len(command) > 1 else ''}.log"
        with (
            log.open("a") as sink,
            subprocess.Popen(
                [*self.prefix, str(SCRIPTS / command[0]), *command[1:]],
                env={**self.environment, **environment},
                cwd=self.root,
                stdout=sink,
                stderr=sink,
                text=True,
            ) as process,
        ):
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    try:
                        process.wait(20)
                    except subprocess.TimeoutExpired:
                        process.kill()


def wait_until(condition: Any, seconds: float = 30, what: str = "it") -> None:
    """Polls another process: there is nothing here to be notified by."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.02)
