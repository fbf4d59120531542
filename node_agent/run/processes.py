"""A rank's container while it runs: started once, found again by a later agent, signalled, removed. All calls block."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bdn.core.errors import DiskFailedError
from bdn.disk.durable import disk_errors
from node_agent.run.directory import RunDirectory, RunRecord

# Of two starters the second fails, and before anything else runs its process is on disk: with its start time, field 22
# of proc(5), since ids are reused.
_LAUNCH: Final = r"""
pid=$1 info=$2; shift 2
read -r stat <"/proc/$$/stat" || exit 97
start=$(set -f; set -- ${stat##*) }; echo "${20}")
set -C; echo "$$ $start" >"$pid" || exit 97; set +C
exec "$@" 3>"$info"
"""
_LAUNCH_SECONDS: Final = 30.0
_ENGINE_SECONDS: Final = 60.0
_REMOVE_SECONDS: Final = 10.0
_ASK_SECONDS: Final = 2.0  # between two questions to an engine, each of which starts a program
KILLED: Final = 128 + signal.SIGKILL


def container_name(record: RunRecord) -> str:
    return f"bdn-{record.run}-{record.rank}"


def launch(directory: RunDirectory, vector: Sequence[str]) -> None:
    """Start the vector in a session of its own, unless the directory was launched before.

    Raises ``DiskFailedError``: the process could not be recorded, so nothing was started.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BDN_")}
    names = [str(directory.pid), str(directory.info)]
    with disk_errors(directory.path), directory.stderr.open("ab") as stderr:
        subprocess.run(  # noqa: S603 - no shell reads the vector
            ["setsid", "--fork", "sh", "-c", _LAUNCH, "bdn-run", *names, *vector],  # noqa: S607 - util-linux
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            check=True,
        )
    if not _is_recorded(directory, _LAUNCH_SECONDS):
        raise DiskFailedError(str(directory.pid), f"no process was started: {directory.last_words()}")


def _is_recorded(directory: RunDirectory, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not (directory.is_launched and directory.pid.stat().st_size):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def _process(directory: RunDirectory) -> int | None:
    """The launched process, if it is still the same one."""
    with suppress(OSError, ValueError, IndexError):
        if directory.is_launched and _is_recorded(directory, 1.0):  # perhaps being written by its shell
            pid, start = directory.pid.read_text().split()
            fields = _stat(int(pid))
            if fields[19] == start and fields[0] not in "ZX":
                return int(pid)
    return None


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


@dataclass
class Sandbox:
    """``bwrap``, and as its only child process 1 of the container."""

    directory: RunDirectory

    def is_alive(self) -> bool:
        return _process(self.directory) is not None

    def signal(self, number: signal.Signals) -> None:
        """To process 1 of the container, if there is one."""
        if (pid := _process(self.directory)) is None:
            return
        child = self._child(pid)
        with suppress(ProcessLookupError):
            if child is not None:
                os.kill(child, number)
            elif number == signal.SIGKILL:
                os.killpg(pid, number)

    def exit_code(self) -> int:
        """Of a container that ended and whose ``start.sh`` left no exit code."""
        return KILLED

    def remove(self) -> None:
        """End what is left of the container. Idempotent."""
        until = time.monotonic() + _REMOVE_SECONDS
        while self.is_alive() and time.monotonic() < until:  # its mounts go with its last process
            self.signal(signal.SIGKILL)
            time.sleep(0.01)

    def _child(self, parent: int) -> int | None:
        with suppress(OSError, ValueError, KeyError, IndexError):
            child = int(json.loads(self.directory.info.read_bytes())["child-pid"])
            if int(_stat(child)[1]) == parent:
                return child
        return None


@dataclass
class EngineContainer:
    """A container of podman or docker, by its name. Until it exists, the process is the engine's ``run``, which pulls."""

    directory: RunDirectory
    program: str
    name: str
    _is_running: bool = True
    _ask_at: float = field(default=0.0)

    def is_alive(self) -> bool:
        if _process(self.directory) is not None:
            return True
        if time.monotonic() >= self._ask_at or self.directory.exit_code() is not None:
            self._is_running = self._state("Running") != "false"
            self._ask_at = time.monotonic() + _ASK_SECONDS
        return self._is_running

    def signal(self, number: signal.Signals) -> None:
        if number == signal.SIGKILL and (pid := _process(self.directory)) is not None:
            with suppress(ProcessLookupError):
                os.killpg(pid, number)
        self._run("kill", "--signal", number.name.removeprefix("SIG"), self.name)

    def exit_code(self) -> int:
        with suppress(ValueError):
            return int(self._state("ExitCode")) or KILLED  # never 0 without a word of ``start.sh``
        return KILLED

    def remove(self) -> None:
        self.signal(signal.SIGKILL)
        self._run("rm", "--force", self.name)

    def _state(self, field_name: str) -> str:
        """Of the container; "false" if there is none, "" if the engine does not answer."""
        done = self._run("container", "inspect", "--format", f"{{{{.State.{field_name}}}}}", self.name)
        if done is None or done.returncode:
            return "false" if done is not None and "no such" in done.stderr.lower() else ""
        return done.stdout.strip()

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str] | None:
        try:
            return subprocess.run(  # noqa: S603 - constants and the container's name
                [self.program, *arguments], capture_output=True, text=True, timeout=_ENGINE_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None


ContainerProcess = Sandbox | EngineContainer


def container_of(directory: RunDirectory, record: RunRecord) -> ContainerProcess:
    if record.launcher == "bwrap":
        return Sandbox(directory)
    return EngineContainer(directory, record.launcher, container_name(record))
