"""The harness of kills and power losses: a program dies at one step of what its user does, is started again, and resumes.

A subclass of ``Scenario`` names the program, what the user does, and what holds afterwards.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import httpx2

from bdn.core.errors import BdnError
from tests.support.crash.forgetful_disk import ForgetfulDisk, Way
from tests.support.services.forked import Process

Action = Callable[[], Awaitable[object]]
# What a user meets of a program that dies.
MET = (BdnError, httpx2.HTTPError, ValueError, AssertionError)


class Running(Protocol):
    """A program that has been started."""

    @property
    def process(self) -> Process: ...


R = TypeVar("R", bound=Running)


class Scenario(ABC, Generic[R]):
    """One program on one directory. ``done`` counts the actions whose answers its user has."""

    done: int = 0

    @abstractmethod
    def running(self) -> AbstractAsyncContextManager[R]:
        """The program, killed at the end of the block. Raises ``AssertionError``: it ended while it started."""

    @abstractmethod
    def actions(self, program: R) -> Sequence[Action]:
        """What the user does, in order."""

    def wrong_files(self) -> Iterable[str]:
        """Files under their final names with other content. Absent ones are not wrong. The program does not run."""
        return ()

    def power_is_back(self) -> None:
        """What a restart of the machine changes besides the disk."""

    async def check(self, program: R, case: str) -> None:
        """All that was acknowledged before the program died is there."""

    async def check_end(self, program: R, case: str) -> None:
        """Once all actions are done, nothing is left over."""

    async def live(self, program: R) -> None:
        """Resume with the first action that was not answered."""
        for action in self.actions(program)[self.done :]:
            await action()
            self.done += 1

    async def until_killed(self, program: R) -> bool:
        """The same, until the process has ended. Returns whether all actions were done before."""
        tasks = [asyncio.create_task(self.live(program)), asyncio.create_task(program.process.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=120)
        assert any(task.done() for task in tasks), "nothing happens"
        is_done = tasks[0].done() and tasks[0].exception() is None
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, *MET):
                await task
        return is_done

    async def resumes(self, program: R, case: str) -> None:
        await self.check(program, case)
        await self.live(program)
        await self.check_end(program, case)


async def survive_power_loss(scenario: Scenario[R], disk: ForgetfulDisk, step: int, way: Way) -> bool:
    """The power fails at that step of an empty disk, and again at the end. Returns whether all actions were done before."""
    case, has_started, is_done = f"step {step}, {way}", False, False
    disk.fail_at(step, ())
    try:
        async with scenario.running() as program:
            has_started = True
            disk.fail_at(step - disk.step, [program.process.pid])
            is_done = await scenario.until_killed(program)
    except AssertionError:
        if has_started or not disk.is_dark:
            raise
    disk.fail_at(0, ())
    for one in (way, "forgotten"):
        where = f"{case}\n{disk.trail(12)}"
        disk.lose_power(one, seed=step)
        scenario.power_is_back()
        wrong = list(scenario.wrong_files())
        assert not wrong, f"{wrong}, {where}"
        async with scenario.running() as program:
            await scenario.resumes(program, where)
    return is_done


async def at_each(root: Path, steps: Sequence[int], one: Callable[[Path, int, int], Awaitable[None]]) -> None:
    """``one`` with a folder, a number and its step, two at a time: a process that starts leaves time for another."""
    numbered = iter(enumerate(steps))

    async def work() -> None:
        for number, step in numbered:
            (root / str(number)).mkdir()
            await one(root / str(number), number, step)

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(work())
