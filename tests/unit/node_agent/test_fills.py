import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from bdn.core.chunk import Digest, digest_of
from bdn.core.errors import DiskFailedError, GrantExpiredError
from bdn.transfer.under_way import UnderWay
from bdn.wire.operation_schema import Tier
from node_agent.background_tasks import BackgroundTasks
from node_agent.fill.fills import Fill, Fills
from tests.support.network.loops import settle

FILE, SECOND, THIRD = map(digest_of, (b"the file", b"the second", b"the third"))


@dataclass
class Waiter:
    """Somebody who waits for the file, with a fill of its own that the test controls."""

    fills: Fills
    error: Exception | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    count: int = 0
    was_canceled: bool = False
    filled: list[Digest] = field(default_factory=list)
    came: dict[Digest, Counter[Tier]] = field(default_factory=dict)

    async def fill(self, fill: Fill) -> None:
        files, report = list(fill.files), fill.report
        self.count += 1
        self.filled += files
        for file in files:
            report(file, "mirror", 10)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.was_canceled = fill.stop.is_set()
            raise
        if self.error:
            raise self.error
        for file in files:
            report(file, "mirror", 5)

    def report(self, file: Digest, tier: Tier, size: int) -> None:
        self.came.setdefault(file, Counter())[tier] += size

    def restart(self, file: Digest) -> None:
        self.came.pop(file, None)

    def join(self, *files: Digest) -> asyncio.Task[None]:
        return asyncio.create_task(self.fills.join(files or (FILE,), self.fill, self.report, self.restart))

    async def joined(self, *files: Digest) -> asyncio.Task[None]:
        """It waits, and its fill has begun, if nobody else fills the files."""
        task = self.join(*files)
        await settle()
        return task


@pytest.fixture
async def fills() -> AsyncIterator[Fills]:
    async with BackgroundTasks() as background:
        yield Fills(background)


async def test_a_file_is_filled_once_for_all_who_wait(fills: Fills) -> None:
    leader, others = Waiter(fills), [Waiter(fills) for _ in range(3)]
    tasks = [await leader.joined()]
    tasks += [other.join() for other in others]
    await settle()
    leader.gate.set()
    await asyncio.gather(*tasks)
    assert leader.count == 1
    assert [other.count for other in others] == [0, 0, 0]
    assert leader.came == {FILE: {"mirror": 15}}
    assert [other.came for other in others] == [{FILE: {"node": 15}}] * 3  # they share what was fetched for the leader


async def test_a_fill_goes_on_when_its_leader_leaves(fills: Fills) -> None:
    leader, other = Waiter(fills), Waiter(fills)
    leading = await leader.joined()
    waiting = await other.joined()
    leading.cancel()
    await settle()
    assert not waiting.done()
    leader.gate.set()
    await waiting
    assert (leader.count, other.count) == (1, 0)


async def test_whoever_waits_for_a_file_knows_what_is_under_way_of_it(fills: Fills) -> None:
    under_way: list[UnderWay] = []

    async def fill(fill: Fill) -> None:
        with fill.under_way.read() as one, fill.under_way.read() as other:
            one.received, other.received = 3, 4
            under_way.append(fill.under_way)
            await gate.wait()

    gate, waiter = asyncio.Event(), Waiter(fills)
    filling = asyncio.create_task(fills.join((FILE, SECOND), fill, waiter.report, waiter.restart))
    await settle()
    assert [fills.under_way(file) for file in (FILE, SECOND, THIRD)] == [under_way[0], under_way[0], None]
    assert under_way[0].received == 7
    gate.set()
    await filling
    assert (fills.under_way(FILE), under_way[0].received) == (None, 0)


async def test_a_disk_that_failed_for_one_failed_for_all(fills: Fills) -> None:
    leader, other = Waiter(fills, DiskFailedError("/cache", "no space")), Waiter(fills)
    tasks = [await leader.joined()]
    tasks.append(await other.joined())
    leader.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [DiskFailedError] * 2
    assert other.count == 0


async def test_who_comes_while_a_fill_is_being_canceled_begins_a_new_one(fills: Fills) -> None:
    first, second = Waiter(fills), Waiter(fills)
    leaving = await first.joined()
    leaving.cancel()  # its fill is canceled within its own next step
    coming = second.join()
    second.gate.set()
    await coming
    assert second.count == 1


async def test_files_that_come_together_share_a_fill_with_those_who_wait_for_one_of_them(fills: Fills) -> None:
    leader, other = Waiter(fills), Waiter(fills)
    tasks = [await leader.joined(FILE, SECOND)]
    tasks.append(await other.joined(SECOND, THIRD))
    assert (leader.filled, other.filled) == ([FILE, SECOND], [THIRD])  # nobody fills a file that somebody fills
    leader.gate.set()
    await settle()
    assert [task.done() for task in tasks] == [True, False]
    other.gate.set()
    await asyncio.gather(*tasks)
    assert leader.came == {FILE: {"mirror": 15}, SECOND: {"mirror": 15}}
    assert other.came == {SECOND: {"node": 15}, THIRD: {"mirror": 15}}


async def test_a_fill_goes_on_while_somebody_waits_for_one_of_its_files_and_ends_with_the_last(fills: Fills) -> None:
    leader, other = Waiter(fills), Waiter(fills)
    leading = await leader.joined(FILE, SECOND)
    waiting = await other.joined(SECOND)
    leading.cancel()
    await settle()
    assert leading.cancelled()
    assert not leader.was_canceled
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert leader.was_canceled


async def test_who_waits_for_files_of_a_fill_that_failed_fills_them_on_a_fill_of_its_own(fills: Fills) -> None:
    leader, other = Waiter(fills, GrantExpiredError("then")), Waiter(fills)
    leading = await leader.joined(FILE, SECOND)
    waiting = await other.joined(SECOND, THIRD)
    leader.gate.set()
    with pytest.raises(GrantExpiredError):
        await leading
    await settle()
    other.gate.set()
    await waiting
    assert other.filled == [THIRD, SECOND]
    assert other.came == {SECOND: {"mirror": 15}, THIRD: {"mirror": 15}}  # what the failed fill reported is void


async def test_who_leads_one_fill_and_fails_leaves_the_others_that_it_waits_for(fills: Fills) -> None:
    first, second = Waiter(fills), Waiter(fills, GrantExpiredError("then"))
    leading = await first.joined(FILE)
    failing = await second.joined(FILE, SECOND)
    second.gate.set()
    with pytest.raises(GrantExpiredError):  # at once, although the other fill goes on
        await failing
    assert not first.was_canceled
    first.gate.set()
    await leading
    assert first.came == {FILE: {"mirror": 15}}
