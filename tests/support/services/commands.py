"""The real commands in processes of their own, with an environment that knows nothing of this machine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tests.support.mirror.backends import behind
from tests.support.network.egress import ALLOW_LOOPBACK
from tests.support.services.forked import Program, fork

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(sys.executable).parent
TRUSTED = ("SSL_CERT_FILE", "SSL_CERT_DIR", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")  # loading the system's takes long
LONGEST_SECONDS = 900

Process = subprocess.Popen[bytes] | Program


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Shell:
    """Runs commands with a home and a data directory below ``root``.

    ``prefix`` may put them into another network. With ``is_forked`` a command costs no imports: see ``forked``.
    """

    root: Path
    extra: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    is_forked: bool = False

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
            "BDN_OUTAGE_SECONDS": "0",  # an upstream that is away is so after six attempts
            **{name: os.environ[name] for name in TRUSTED if name in os.environ},
            **({} if "BDN_URL" in self.extra else behind(self.data).environment),  # no mirror of its own
            **self.extra,
        }

    @property
    def data(self) -> Path:
        return self.root / "data"

    def executed(self) -> Self:
        """The same user, whose commands are executed."""
        return replace(self, is_forked=False)

    def run(self, *command: str, given: bytes = b"", **environment: str) -> Finished:
        """To its end, with ``given`` on standard input."""
        with ExitStack() as stack:
            into, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            into.write(given)
            into.seek(0)
            process = stack.enter_context(self._start(command, environment, into.fileno(), out.fileno(), err.fileno()))
            code = process.wait(LONGEST_SECONDS)
            out.seek(0)
            err.seek(0)
            return Finished(code, out.read().decode(), err.read().decode())

    def told(self, *command: str, code: int = 0) -> Any:
        """The document that a command prints, which ends with this code."""
        done = self.run(*command, "--json")
        assert done.code == code, done.out + done.err
        return done.document

    @contextlib.contextmanager
    def running(self, *command: str, **environment: str) -> Iterator[Process]:
        """In the background, until the block ends; its output is in ``root/<command>.log``."""
        log = self.root / f"{command[0]}-{command[1] if len(command) > 1 else ''}.log"
        with log.open("a") as sink, self._start(command, environment, None, sink.fileno(), sink.fileno()) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(20)

    @contextlib.contextmanager
    def _start(
        self, command: Sequence[str], environment: dict[str, str], given: int | None, out: int, err: int
    ) -> Iterator[Process]:
        """Killed at the end if it is still there."""
        full = [*self.prefix, str(SCRIPTS / command[0]), *command[1:]]
        given_environment = {**self.environment, **environment}
        process: Process
        if self.is_forked:
            process = fork(full, given_environment, out=out, err=err, given=given, folder=self.root)
        else:
            process = subprocess.Popen(full, env=given_environment, cwd=self.root, stdin=given, stdout=out, stderr=err)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def wait_until(condition: Any, seconds: float = 120, what: str = "it") -> None:
    """Polls another process: there is nothing here to be notified by."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.02)
