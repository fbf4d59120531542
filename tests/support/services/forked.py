"""Programs in processes of their own, forked from one that has imported everything already: a start takes a fifth of its CPU.

What differs from ``python -m MODULE`` is only how the modules came into memory. The process has its own descriptors, environment and
signals, is killed by its own id, and ends without a word to the one that it was forked from.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Final

# Each imports what its program takes; the programs' own files are run, not imported.
PRELOADED: Final = (
    "bdn.cli.main",
    "bdn.cli.serve",
    "node_agent.server",
    "tests.support.crash.killing_steps",
)


class ForkedProcess:
    """A running program, with as much of ``asyncio.subprocess.Process`` as tests need."""

    def __init__(self, process: ForkServerProcess, loop: asyncio.AbstractEventLoop) -> None:
        assert process.pid
        self.pid = process.pid
        self._process = process
        self._loop = loop
        self._ended: asyncio.Future[int] = loop.create_future()
        loop.add_reader(process.sentinel, self._end)

    @property
    def returncode(self) -> int | None:
        """As asyncio has it: the negative number of the signal that ended it."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing is sent to one that has ended just now: its id may be another's.

        Raises:
            ProcessLookupError: it is known to have ended.
        """
        if self._ended.done():
            raise ProcessLookupError(self.pid)
        if not wait([self._process.sentinel], 0):
            with suppress(ProcessLookupError):  # it ends at this moment: we shall hear of it
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._process.join()
        assert self._process.exitcode is not None
        self._ended.set_result(self._process.exitcode)
        self._process.close()


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
    with Connection(os.dup(out), readable=False) as sent_out, Connection(os.dup(err), readable=False) as sent_err:
        arguments = (command, dict(environment), sent_out, sent_err)
        process = _context().Process(target=_run, args=arguments, daemon=True)
        await asyncio.to_thread(process.start)  # the first one waits for all the imports
    return ForkedProcess(process, asyncio.get_running_loop())


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _run(command: Sequence[str], environment: Mapping[str, str], out: Connection, err: Connection) -> None:
    with Path(os.devnull).open("rb") as nothing, out, err:
        for number, descriptor in enumerate((nothing.fileno(), out.fileno(), err.fileno())):
            os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(environment)
    _, way, what, *arguments = command
    sys.argv = [way, *arguments]
    if way == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(what, {"__name__": "__main__"})
