"""Whatever the network does between an upstream and the mirror: right bytes are published in the end, or nothing is."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.support.mirror.scripted_upstreams import FILES, STALL, TRANSFERS, Pauses, ScriptedUpstream
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test
from tests.support.network.fault_proxy import Fault, FaultProxy
from tests.support.network.fault_proxy_faults import LASTING, PASSING, flips_a_bit, name_of, shifts_the_range
from tests.support.promises.tally import Tally

pytestmark = pytest.mark.promise("network")
pytest_plugins = ("tests.support.mirror.fixtures", "tests.support.mirror.upstream_fixtures")

LONGEST_SECONDS: Final = 60.0


@pytest.fixture
async def mirror(proxy: FaultProxy, no_turns: None, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with mirror_under_test(tmp_path / "mirror", pause=Pauses(), stall=STALL, transfers=TRANSFERS) as mirror:
        yield mirror


KINDS: Final = ("hf", "s3", "gs")


def met(faults: Sequence[Fault]) -> pytest.MarkDecorator:
    """Every fault on the way from one upstream; all from all of them take a minute."""
    everywhere = os.environ.get("BDN_FAULT") == "full"
    rows = [
        pytest.param(kind, fault, id=f"{kind}-{name_of(fault)}")
        for number, fault in enumerate(faults)
        for kind in (KINDS if everywhere else (KINDS[number % len(KINDS)],))
    ]
    return pytest.mark.parametrize(("upstream", "fault"), rows, indirect=["upstream"])


@met([*PASSING, shifts_the_range])
async def test_a_fault_on_the_way_from_an_upstream_costs_requests_alone(
    mirror: MirrorUnderTest, upstream: ScriptedUpstream, proxy: FaultProxy, fault: Fault, tally: Tally
) -> None:
    proxy.play(fault)
    async with asyncio.timeout(LONGEST_SECONDS):
        document = await mirror.ready(upstream.wanted)

    found = await mirror.tree(document["sources"][0]["manifest"])
    tally.add(scenarios=1, faults=proxy.met.total(), wrong=found != FILES)
    assert proxy.met[name_of(fault)] == 1
    if fault is not flips_a_bit:
        assert not mirror.count("quarantined_files"), "bytes came wrong, though nobody changed any"


@met(LASTING)
async def test_an_upstream_that_stays_out_of_reach_is_named_and_nothing_is_published(
    mirror: MirrorUnderTest, upstream: ScriptedUpstream, proxy: FaultProxy, fault: Fault, tally: Tally
) -> None:
    proxy.every = fault
    async with asyncio.timeout(LONGEST_SECONDS):
        error = await mirror.failed(upstream.wanted)
    proxy.heal()
    document = await mirror.ready(upstream.wanted)

    found = await mirror.tree(document["sources"][0]["manifest"])
    tally.add(scenarios=1, faults=proxy.met.total(), refused=1, wrong=found != FILES)
    assert (error["code"], error["retryable"]) == ("UPSTREAM_UNAVAILABLE", True)
    assert upstream.wanted["source"].split("@")[0] in str(error)
