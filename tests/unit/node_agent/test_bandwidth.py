"""Rates that an operator sets are kept, and stages read first."""

import asyncio

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.pace.rate_limit import ONE_IN, TrafficClass
from node_agent.fetch.bandwidth import Bandwidth
from tests.support.network.loops import run_hurried, settle

STAGE, PREFETCH, SCRUB = TrafficClass
RATE = CHUNK_SIZE  # a chunk in a second; the first one is the burst


@pytest.mark.parametrize(("download_rate", "prefetch_rate", "traffic", "seconds"), [
    (None, None, STAGE, 0), (None, None, PREFETCH, 0), (None, None, SCRUB, 0),
    (RATE, None, STAGE, 4), (RATE, None, PREFETCH, 4), (RATE, None, SCRUB, 4),
    (None, RATE, STAGE, 0), (None, RATE, PREFETCH, 4), (None, RATE, SCRUB, 0),
    (2 * RATE, RATE, PREFETCH, 4), (RATE, 2 * RATE, PREFETCH, 4), (2 * RATE, RATE, STAGE, 2),
    (40 * RATE, None, STAGE, 0),  # a quarter of a second may come at once
])  # fmt: skip
def test_five_chunks_take_as_long_as_the_rates_of_their_traffic_say(
    download_rate: int | None, prefetch_rate: int | None, traffic: TrafficClass, seconds: float
) -> None:
    async def read() -> float:
        bandwidth = Bandwidth(download_rate, prefetch_rate)

        async def chunk() -> None:
            async with bandwidth.turn(traffic, CHUNK_SIZE):
                pass

        await asyncio.gather(*(chunk() for _ in range(5)))
        return asyncio.get_running_loop().time()

    assert run_hurried(read()) == pytest.approx(seconds, abs=1e-6)


def test_at_a_rate_a_stage_waits_for_one_chunk_that_was_requested_before_it() -> None:
    async def read() -> list[str]:
        bandwidth, order = Bandwidth(RATE, None), list[str]()

        async def chunk(traffic: TrafficClass) -> None:
            async with bandwidth.turn(traffic, CHUNK_SIZE):
                order.append(traffic.name)

        async with asyncio.TaskGroup() as group:
            for traffic in (SCRUB, PREFETCH, SCRUB, PREFETCH, STAGE, STAGE):
                group.create_task(chunk(traffic))
                await settle()
        return order

    assert run_hurried(read()) == ["SCRUB", "PREFETCH", "STAGE", "STAGE", "PREFETCH", "SCRUB"]


@pytest.mark.parametrize(("higher", "lower"), [(STAGE, PREFETCH), (PREFETCH, SCRUB)])
def test_at_a_rate_a_lower_class_reads_its_share_while_a_higher_class_always_waits(
    higher: TrafficClass, lower: TrafficClass
) -> None:
    async def read() -> dict[TrafficClass, int]:
        bandwidth, count = Bandwidth(RATE, None), dict.fromkeys(TrafficClass, 0)

        async def chunks(traffic: TrafficClass) -> None:
            while sum(count.values()) < 1000:
                async with bandwidth.turn(traffic, CHUNK_SIZE):
                    count[traffic] += sum(count.values()) < 1000

        async with asyncio.TaskGroup() as group:
            for traffic in (*[higher] * 16, *[lower] * 16):
                group.create_task(chunks(traffic))
        return count

    count = run_hurried(read())
    assert count[higher] / count[lower] == pytest.approx(ONE_IN, rel=0.1)


@pytest.mark.parametrize("traffic", [PREFETCH, SCRUB])
async def test_without_a_rate_the_rest_reads_one_chunk_at_a_time_while_a_stage_reads(traffic: TrafficClass) -> None:
    bandwidth, reading, gates = Bandwidth(None, None), list[int](), [asyncio.Event() for _ in range(3)]

    async def chunk(number: int) -> None:
        async with bandwidth.turn(traffic, CHUNK_SIZE):
            reading.append(number)
            await gates[number].wait()

    async with asyncio.TaskGroup() as group:
        async with bandwidth.turn(STAGE, CHUNK_SIZE):
            for number in range(3):
                group.create_task(chunk(number))
            await settle()
            assert reading == [0]
            gates[0].set()
            await settle()
            assert reading == [0, 1]
        await settle()
        assert reading == [0, 1, 2]
        for gate in gates:
            gate.set()


def test_a_stage_that_gives_up_its_turn_is_in_nobodys_way() -> None:
    async def read() -> list[float]:
        bandwidth, times, both = Bandwidth(RATE, None), list[float](), asyncio.Barrier(2)

        async def chunk() -> None:
            async with bandwidth.turn(PREFETCH, CHUNK_SIZE):
                times.append(asyncio.get_running_loop().time())
                await both.wait()  # they read at the same time: no stage reads

        async with bandwidth.turn(STAGE, CHUNK_SIZE):
            pass
        stage = asyncio.create_task(bandwidth.turn(STAGE, CHUNK_SIZE).__aenter__())
        await settle()
        stage.cancel()
        await asyncio.gather(chunk(), chunk())
        return times

    assert run_hurried(read()) == pytest.approx([1, 2])
