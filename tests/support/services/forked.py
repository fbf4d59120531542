"""Programs in processes of their own, forked from one that has imported everything already: a start takes a fifth of its CPU.

What differs from ``python -m MODULE`` is only how the modules came into memory. The process has its own descriptors, environment and
signals, is killed by its own id, and ends without a word to the one that it was forked from.
"""

import asyncio
import multiprocessing
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Final

import bdn.cli
import bdn.local

# Each imports what its program takes; the programs' own files are run, not imported.
PRELOADED: Final = (
    *(f"{one.__name__}.{module.name}" for one in (bdn.cli, bdn.local) for module in pkgutil.iter_modules(one.__path__)),
    "aiosqlite",
    "anyio._backends._asyncio",
    "bdn.sources.huggingface",
    "node_agent.embedded",
    "node_agent.__main__",
    "node_agent.daemon",
    "tests.support.crash.killing_steps",
    "uvicorn.protocols.http.h11_impl",
)


class Program:
    """A running program, with as much of ``subprocess.Popen`` as tests need."""

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid
        self.pid = process.pid
        self.process = process

    def poll(self) -> int | None:
        """As ``subprocess`` has it: the negative number of the signal that ended it."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises ``subprocess.TimeoutExpired``."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self.process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing is sent to one that has ended just now: its id may be another's."""
        if not wait([self.process.sentinel], 0):
            with suppress(ProcessLookupError):  # it ends at this moment: we shall hear of it
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedProcess:
    """The same, with as much of ``asyncio.subprocess.Process``."""

    def __init__(self, program: Program, loop: asyncio.AbstractEventLoop) -> None:
        self.pid = program.pid
        self._program = program
        self._loop = loop
        self._ended: asyncio.Future[int] = loop.create_future()
        loop.add_reader(program.process.sentinel, self._end)

    @property
    def returncode(self) -> int | None:
        """As asyncio has it: the negative number of the signal that ended it."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: signal.Signals) -> None:
        """Raises ``ProcessLookupError`` for one that is known to have ended."""
        if self._ended.done():
            raise ProcessLookupError(self.pid)
        self._program.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self) -> None:
        self._loop.remove_reader(self._program.process.sentinel)
        self._ended.set_result(self._program.wait())
        self._program.process.close()


Process = asyncio.subprocess.Process | ForkedProcess


def executed(command: Sequence[str]) -> tuple[str, ...]:
    """The same command, not to be forked: for whoever measures the memory of a program, or sets how it allocates."""
    return ("env", *command)


async def start(command: Sequence[str], environment: Mapping[str, str], out: int, err: int) -> Process:
    """``python -m MODULE …`` and ``python -c CODE …`` are forked; whatever else is executed.

    ``out`` and ``err`` are the descriptors that become its standard output and error; the caller closes his own.
    """
    if command[0] != sys.executable or command[1] not in {"-m", "-c"}:
        return await asyncio.create_subprocess_exec(
            *command, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err
        )
    program = await asyncio.to_thread(fork, command, environment, out=out, err=err)  # the first waits for the imports
    return ForkedProcess(program, asyncio.get_running_loop())


def fork(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    out: int,
    err: int,
    given: int | None = None,
    folder: Path | None = None,
) -> Program:
    """``python -m MODULE …``, ``python -c CODE …`` or ``SCRIPT …``, where the script is Python.

    ``given`` is the descriptor that becomes its standard input: none is empty. ``folder`` becomes its working directory.
    """
    with ExitStack() as stack:
        nothing = stack.enter_context(Path(os.devnull).open("rb"))
        inherited = (nothing.fileno() if given is None else given, out, err)
        sent = [stack.enter_context(Connection(os.dup(one), readable=False)) for one in inherited]
        arguments = (tuple(command), dict(environment), sent, folder)
        process = _context().Process(target=_run, args=arguments, daemon=True)
        process.start()
    return Program(process)


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _run(
    command: tuple[str, ...], environment: Mapping[str, str], inherited: Sequence[Connection], folder: Path | None
) -> None:
    for number, one in enumerate(inherited):
        os.dup2(one.fileno(), number)
        one.close()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as Python opens it at a start
    os.environ.clear()
    os.environ.update(environment)
    if folder:
        os.chdir(folder)
    if command[0] != sys.executable:
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")
        return
    _, way, what, *arguments = command
    sys.argv = [way, *arguments]
    if way == "-m":
        sys.modules.pop(f"{what}.__main__", None)  # or Python warns that it was imported before
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(what, {"__name__": "__main__"})
