"""Every job of a mirror keeps the pace that an upstream can bear, and waits when it asks to wait."""

from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bdn.core.errors import UpstreamRateLimitedError
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import answer, rate_limited, right_after
from tests.doubles.hub import Hub
from tests.support.mirror.scripted_upstreams import FILES, SMALL, Pauses, ScriptedUpstream, check
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source
from tests.support.services.commands import wait_until

pytest_plugins = ("tests.support.mirror.fixtures", "tests.support.mirror.upstream_fixtures")

ONE_UPSTREAM = pytest.mark.parametrize("upstream", ["s3"], indirect=True)  # what is the same for all


@ONE_UPSTREAM
async def test_an_upstream_that_is_closed_for_an_hour_fails_whoever_asks_and_hears_nothing_more(
    patient: MirrorUnderTest, upstream: ScriptedUpstream, pauses: Pauses
) -> None:
    upstream.fail_listing(rate_limited(3600))
    document = await patient.mirror(upstream.wanted)
    assert document["error"]["code"] == UpstreamRateLimitedError.code
    count = sum(request.origin != "oauth" for request in upstream.log.find())

    for wanted in (upstream.wanted, upstream.neighbour):
        error = (await patient.mirror(wanted))["error"]
        assert (error["code"], error["retryable"]) == (UpstreamRateLimitedError.code, True)
        assert "says to wait 35" in error["message"]

    assert sum(request.origin != "oauth" for request in upstream.log.find()) == count, "oauth is another host"
    assert not [seconds for seconds in pauses.seconds if seconds > 60]


@ONE_UPSTREAM
async def test_who_asks_for_a_plan_is_told_at_once_that_the_upstream_is_busy(
    patient: MirrorUnderTest, upstream: ScriptedUpstream, pauses: Pauses
) -> None:
    upstream.fail_listing(rate_limited(2), times=None)
    for _ in range(2):
        error = (await patient.post(upstream.wanted, dry_run=True)).json()["error"]
        assert (error["code"], error["retryable"]) == (UpstreamRateLimitedError.code, True)
    assert upstream.log.count(upstream.listing) == 1
    assert pauses.seconds == []


async def test_a_page_that_fails_is_asked_for_alone(upstreams: None, patient_hub: MirrorUnderTest, hub: Hub) -> None:
    files = {f"{number:04}.txt": b"%d" % (number % 7) for number in range(3500)}
    hub.repo("org/many").commit(files)
    hub.fail(answer(500), "/tree/.*cursor=", skip=1, times=3)

    plan = await patient_hub.ready(source("hf://org/many"))

    assert plan["files_total"] == 3500
    assert hub.log.count("/tree/") == 4 + 3
    assert hub.log.count("/tree/[^&]*&[^&]*$") <= 1, "the first page was asked for once"


@ONE_UPSTREAM
async def test_what_is_done_to_upstreams_is_measured(patient: MirrorUnderTest, upstream: ScriptedUpstream) -> None:
    upstream.fail(answer(500), times=2)
    upstream.fail(rate_limited(50), skip=2)  # longer than the test takes
    upstream.fail(answer(403), file=SMALL)
    await check(patient, await patient.mirror(upstream.wanted, upstream.neighbour), FILES)

    text = (await patient.http.get("/metrics")).text
    found = {
        sample.name + sample.labels.get("outcome", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    assert found["bdn_upstream_requests_totalfailed"] == 2
    assert found["bdn_upstream_requests_totalrefused"] == 1
    assert found["bdn_upstream_requests_totalanswered"] == 1
    assert found["bdn_upstream_requests_totalarrived"] >= 10
    assert found["bdn_upstream_retries_total"] == 3
    assert found["bdn_upstream_pauses_total"] >= 1
    assert 0 < found["bdn_upstream_pause_seconds_total"] <= 50 * found["bdn_upstream_pauses_total"]
    assert found["bdn_upstream_limit"] >= 1
    assert found["bdn_upstream_slots"] == 0
    assert found["bdn_upstream_hosts_closed"] == 1
    assert "127.0.0.1" not in text


async def test_requests_in_flight_are_limited(upstreams: None, hub: Hub, pauses: Pauses, tmp_path: Path) -> None:
    for number in range(4):
        contents = {f"{number}-{part}.bin": GeneratedContent(9_000_000, seed=2 * number + part) for part in range(2)}
        hub.repo(f"org/{number}").commit({**contents, "a.txt": b"%d" % number})

    def has_two(origin: str) -> bool:
        return hub.most_at_once[origin] >= 2

    for origin in ("hub", "cdn"):  # no request is answered before two of them are there
        hub.fail(right_after(partial(wait_until, partial(has_two, origin))), origin=origin, times=None)
    async with mirror_under_test(tmp_path / "mirror", pause=pauses, transfers=2, jobs=4) as mirror:
        begun = [await mirror.begin(source(f"hf://org/{number}")) for number in range(4)]
        assert {(await mirror.ended(one["id"]))["status"] for one in begun} == {"READY"}
    assert hub.most_at_once == {"hub": 2, "cdn": 2}
