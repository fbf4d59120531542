"""The directory of a rank on this node: what its container reads and writes, and what only the agent does.

``shared`` is visible in the container at ``/b10/run``. A job may put anything there, so the agent follows no link in it,
and ids of processes are outside. The other files are the agent's alone. In a pod ``bdn-rank`` is in the agent's place.
"""

import os
import shlex
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from pydantic import BaseModel, ValidationError

from bdn.core.errors import InvalidRequestError, ScratchFullError
from bdn.core.training.environment import is_variable
from bdn.disk.durable import disk_errors, make_folder, sync_folder
from bdn.wire.run_schema import LauncherName, RunSpec
from node_agent.disk.trash import Trash
from node_agent.job.bounds import entries_below

_SCRIPT: Final = Path(__file__).with_name("start.sh")
_PRIVATE: Final = 0o700
_CODES: Final = range(256)
_MOST_BYTES: Final = 1024**3
_MOST_ENTRIES: Final = 10_000
_TAIL: Final = 2000  # bytes of an error message


class RunRecord(BaseModel):
    """What an agent must know to adopt a rank. ``gpus`` are indices of this node's GPUs. No secrets."""

    run: str
    rank: int
    boot: str
    launcher: LauncherName
    gpus: list[int] = []


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.shared = path / "shared"
        self.output = self.shared / "output"
        self.env = self.shared / "env"
        self.alive = self.shared / "alive"
        self.pid = path / "pid"
        self.info = path / "info"
        self.login = path / "login"
        self.sent = path / "sent.json"
        self.stderr = path / "launcher.err"

    def make(self, record: RunRecord, spec: RunSpec, notes: Iterable[str], trash: Trash) -> None:
        """Create the directory anew, whole by one rename. Its output begins with ``notes``. Blocking.

        Raises ``InvalidRequestError``: a variable has a name that a shell refuses; ``DiskFailedError``.
        """
        new = RunDirectory(self.path.with_name(f".{self.path.name}"))
        trash.discard(new.path)
        with disk_errors(self.path):
            make_folder(self.path.parent, _PRIVATE)
            for folder in (new.path, new.shared):
                folder.mkdir(mode=_PRIVATE)
            new.fill(spec, notes)
            (new.path / "spec.json").write_text(record.model_dump_json())
            trash.discard(self.path)
            new.path.rename(self.path)
            sync_folder(self.path.parent)

    def fill(self, spec: RunSpec, notes: Iterable[str] = ()) -> None:
        """Write into ``shared`` what the container finds there. Blocking. Raises as ``make``."""
        with disk_errors(self.shared):
            (self.shared / "start.sh").write_bytes(_SCRIPT.read_bytes())
            (self.shared / "start.sh").chmod(0o755)
            width = max(3, len(str(len(spec.commands))))
            for number, command in enumerate(spec.commands):
                (self.shared / f"command.{number:0{width}}").write_text(command)
            write_private(self.env, _exports(spec.environment))
            self.output.write_text("".join(f"{note}\n" for note in notes))

    def record(self) -> RunRecord | None:
        """None: the directory is not whole, because it is being removed."""
        try:
            return RunRecord.model_validate_json((self.path / "spec.json").read_bytes())
        except (OSError, ValidationError):
            return None

    @property
    def is_launched(self) -> bool:
        return self.pid.exists()

    @property
    def is_ready(self) -> bool:
        return os.path.lexists(self.shared / "ready")

    @property
    def is_going(self) -> bool:
        return os.path.lexists(self.shared / "go")

    def go(self) -> None:
        """Let the commands of the rank start. Idempotent. Blocking. Raises ``DiskFailedError``."""
        with disk_errors(self.shared), suppress(FileExistsError):
            os.close(os.open(self.shared / "go", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))

    def write_login(self, content: str) -> None:
        """Write the registry's login for the engine alone. Blocking. Raises ``DiskFailedError``."""
        with disk_errors(self.login):
            self.login.mkdir(mode=_PRIVATE, exist_ok=True)
            write_private(self.login / "config.json", content)

    def remove_login(self) -> None:
        with disk_errors(self.login):
            (self.login / "config.json").unlink(missing_ok=True)

    def exit_code(self) -> int | None:
        """As ``start.sh`` wrote it after the last process of the rank had ended. Blocking."""
        with suppress(OSError, ValueError), opened_plain(self.shared / "exit_code") as file:
            code = int(file.read(16))
            return code if code in _CODES else None
        return None

    def check_size(self, most_bytes: int = _MOST_BYTES, most_entries: int = _MOST_ENTRIES) -> None:
        """Of ``shared`` without ``output``, which its sender bounds. Blocking. Raises ``ScratchFullError``."""
        with disk_errors(self.shared):
            output: os.stat_result | None = None
            with suppress(FileNotFoundError):
                output = self.output.lstat()
            used = 0
            for number, found in enumerate(entries_below(self.shared), 1):
                if found is None or number > most_entries:
                    raise ScratchFullError(str(self.shared), None, most_bytes)
                if output is None or not stat.S_ISREG(output.st_mode) or not os.path.samestat(found, output):
                    used += found.st_blocks * 512
                if used > most_bytes:
                    raise ScratchFullError(str(self.shared), used, most_bytes)

    def last_words(self) -> str:
        """Why a rank ended before it was ready: the end of what the launcher, or else ``start.sh``, wrote. Blocking."""
        for path in (self.stderr, self.output):
            with suppress(OSError), opened_plain(path) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
                if text := file.read(_TAIL).decode("utf-8", "replace").strip():
                    return text
        return "no reason given"


def opened_plain(path: Path, mode: str = "rb") -> BinaryIO:
    """A plain file that a job may have replaced by anything. Raises ``OSError`` if it did."""
    flags = (os.O_RDWR if "+" in mode else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = open(os.open(path, flags), mode, buffering=0)  # noqa: PTH123, SIM115 - of a descriptor
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a file")
    return file  # type: ignore[return-value]


def write_private(path: Path, content: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:  # noqa: PTH123
        file.write(content)


def _exports(environment: dict[str, str]) -> str:
    for name, value in environment.items():
        if not is_variable(name) or "\0" in value:
            raise InvalidRequestError(f"{name!r} is not a variable that a shell accepts")
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
