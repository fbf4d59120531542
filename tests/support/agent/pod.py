"""A pod of one rank without Kubernetes: three containers that share folders, of which the job's own is a sandbox with its own processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bdn.core.training.environment import WORKSPACE
from node_agent.run.directory import RunDirectory
from node_agent.run.launchers import RUN_PLACE, Bind, Container, bwrap
from tests.support.services.forked import Process, start
from tests.support.waiting import until

CHECKPOINTS: Final = "/mnt/ckpts"
SHELLS: Final[dict[str, tuple[str, ...]]] = {"dash": (), "bash": ("--posix",), "busybox": ("sh",)}
_PROGRAM: Final = (sys.executable, "-m", "node_agent.run")
_CONFINED: Final = ("--unshare-pid", "--as-pid-1", "--die-with-parent", "--cap-drop", "ALL", "--ro-bind", "/", "/")
# The half minute after which a rank is ended by force takes three seconds.
_QUICK_DATE: Final = "#!/bin/sh\necho $(($(/usr/bin/date +%s) * 10))\n"


@dataclass(frozen=True)
class MainContainer:
    """The job's container. ``process`` ends with its exit code; 128 + n for signal n."""

    process: subprocess.Popen[bytes]
    info: Path

    def signal(self, number: signal.Signals) -> None:
        """To process 1 of the container."""
        os.kill(int(json.loads(self.info.read_bytes())["child-pid"]), number)

    async def exit_code(self) -> int:
        await until(lambda: self.process.poll() is not None)
        return self.process.returncode


@dataclass(frozen=True)
class RankPod:
    """``root`` is what the containers of BDN see as their file system. ``given`` is their environment beyond the pod's own."""

    root: Path
    url: str
    run: str
    given: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        places = ("rank/shared", "b10/workspace", "b10/archive", "podinfo", CHECKPOINTS.lstrip("/"), "dev")
        for place in (*places, "home", "quick"):
            (self.root / place).mkdir(parents=True)
        (self.root / "podinfo/want").write_text("stage")
        self.termination.touch()
        (self.root / "quick/date").write_text(_QUICK_DATE)
        (self.root / "quick/date").chmod(0o755)

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.root / "rank")

    @property
    def workspace(self) -> Path:
        return self.root / "b10/workspace"

    @property
    def checkpoints(self) -> Path:
        return self.root / CHECKPOINTS.lstrip("/")

    @property
    def termination(self) -> Path:
        return self.root / "dev/termination-log"

    @property
    def log(self) -> str:
        return (self.root / "bdn.log").read_text()

    def go(self) -> None:
        """As the kubelet shows an annotation that was changed."""
        new = self.root / "podinfo/new"
        new.write_text("go")
        new.rename(self.root / "podinfo/want")

    @asynccontextmanager
    async def program(
        self, command: str, *, is_confined: bool = False, program: tuple[str, ...] = _PROGRAM
    ) -> AsyncIterator[Process]:
        """``prepare`` or ``follow``; killed at the end if it is still there.

        ``is_confined``: as process 1 of a container that may write its volumes alone, and has no capabilities.
        """
        own = {"BDN_URL": self.url, "BDN_RUN": self.run, "BDN_NODE": "node-1", "BDN_POD_UID": "uid-1"}
        volumes = ("--bind", str(self.root), str(self.root), "--proc", "/proc", "--dev", "/dev")
        container = ("bwrap", *_CONFINED, *volumes) if is_confined else ()
        with (self.root / "bdn.log").open("ab") as log:
            arguments = (*container, *program, command, "--root", str(self.root))
            process = await start(arguments, os.environ | own | self.given, log.fileno(), log.fileno())
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def prepared(self, *, is_confined: bool = False) -> None:
        async with self.program("prepare", is_confined=is_confined) as process:
            assert await process.wait() == 0, self.log

    @contextmanager
    def main(
        self, *, shell: str | None = None, is_quick: bool = False, working_dir: str = WORKSPACE
    ) -> Iterator[MainContainer]:
        """The job's container; killed at the end. ``shell``: a program that runs the script, instead of the sandbox's own."""
        binds = (
            Bind(self.directory.shared, RUN_PLACE, is_writable=True),
            Bind(self.workspace, "/b10/workspace", is_writable=True),
            Bind(self.checkpoints, CHECKPOINTS, is_writable=True),
            *((Bind(self.root / "quick", "/quick"),) if is_quick else ()),
            *((Bind(Path(shell), f"/{Path(shell).name}"),) if shell else ()),
        )
        is_root = os.geteuid() == 0
        container = Container("main", binds, self.root / "home", working_dir=working_dir, is_root=is_root)
        vector, info = list(bwrap(container)), self.root / "main.info"
        at = vector.index(f"{RUN_PLACE}/start.sh")
        if shell:
            vector[at:at] = [f"/{Path(shell).name}", *SHELLS[Path(shell).name]]
        if is_quick:
            vector[at:at] = ["--setenv", "PATH", f"/quick:{os.environ['PATH']}"]
        with (self.root / "main.log").open("ab") as log:
            process = subprocess.Popen(["sh", "-c", 'exec 3>"$0"; exec "$@"', info, *vector], stdout=log, stderr=log)
        main = MainContainer(process, info)
        try:
            yield main
        finally:
            if process.poll() is None:
                with suppress(OSError, ValueError, KeyError):
                    main.signal(signal.SIGKILL)
                process.kill()
                process.wait()


def shells() -> list[str]:
    """The shells of this machine that may be an image's ``sh``."""
    return [path for name in SHELLS if (path := shutil.which(name)) is not None]
