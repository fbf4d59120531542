"""Logs of training jobs: each line once and in order, in pages that clients continue as they do."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bdn.mirror.db.database import Database
from bdn.mirror.training.logs import Logs
from tests.fakes.clock import Clock
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, refusal, statements_of
from tests.support.mirror.training_jobs import CPUS, JobAgent, JobClient, spec
from tests.support.network.service import listening
from tests.support.services.commands import Shell
from tests.support.services.training import CLIENTS

pytest_plugins = ("tests.support.mirror.fixtures",)

SECOND = 10**9  # nanoseconds
MILLI = 10**6


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def timed(clock: Clock, upstreams: None, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with mirror_under_test(tmp_path / "mirror", clock=clock, work=False) as mirror:
        yield mirror


class Written:
    """A job with ranks whose output a test writes."""

    def __init__(self, client: JobClient, job: str, agents: list[JobAgent]) -> None:
        self.client, self.job, self.agents = client, job, agents

    @classmethod
    async def of(cls, mirror: MirrorUnderTest, ranks: int = 1) -> "Written":
        agents = [JobAgent(mirror, f"n{rank}", {**CPUS, "slots": 9}) for rank in range(ranks)]
        client = await JobClient.of(mirror)
        for agent in agents:
            await agent.beat()
        job = await client.create(spec(nodes=ranks))
        for _ in range(2):
            await mirror.service.controller.look()
        return cls(client, job, agents)

    async def print(self, rank: int, seq: int, *lines: tuple[int, str]) -> None:
        await self.agents[rank].print(f"run:{self.job}:{rank}:go", seq, *lines)

    async def output(self, **query: object) -> list[Json]:
        """The lines of ranks."""
        lines = await self.client.lines(self.job, direction="asc", **query)
        return [line for line in lines if line["replica"] is not None]

    async def texts(self, **query: object) -> list[str]:
        return [line["message"] for line in await self.output(**query)]


def at(clock: Clock, seconds: float = 0.0) -> int:
    return round((clock.now + seconds) * SECOND)


async def test_a_batch__is_stored_once_and_of_a_longer_one_the_rest(timed: MirrorUnderTest, clock: Clock) -> None:
    job = await Written.of(timed)
    one, two, three = ((at(clock), text) for text in ("one", "two", "three"))
    await job.print(0, 0, one)
    await job.print(0, 0, one)
    await job.print(0, 0, one, two)
    await job.print(0, 1, three)
    await job.print(0, 0, one)
    await job.print(0, 2)
    assert await job.texts() == ["one", "two", "three"]
    unknown = await job.agents[0].http.post(f"/runs/{job.job}/5/logs", json={"seq": 0, "lines": []})
    assert refusal(unknown) == (404, "NOT_FOUND")


async def test_output_and_reports__do_not_read_the_request_of_the_job(timed: MirrorUnderTest, clock: Clock) -> None:
    job = await Written.of(timed)
    with statements_of(timed) as seen:
        await job.print(0, 0, (at(clock), "one"))
        await job.agents[0].report(f"run:{job.job}:0:stage", "STAGED")
    about = [statement for statement in seen if re.search(r"\btraining_jobs\.ranks\b", statement)]
    assert len(about) >= 3
    assert not [statement for statement in about if re.search(r"\btraining_jobs\.request\b", statement)]


async def test_lines__are_dated_near_their_arrival_and_increase_within_a_rank(
    timed: MirrorUnderTest, clock: Clock
) -> None:
    created = at(clock)
    job = await Written.of(timed, ranks=2)
    clock.now += 100
    await job.print(0, 0, (at(clock, -1000), "old"), (at(clock, -10), "late"), (at(clock, 1000), "ahead"))
    await job.print(0, 1, (0, "same"), (0, "same"))
    await job.print(1, 0, (at(clock, -10), "other rank"))
    lines = await job.output()
    times = {(line["message"], line["replica"]): int(line["timestamp"]) for line in lines}
    now = at(clock)
    assert times["old", "r0"] == now - 45 * SECOND
    assert times["late", "r0"] == times["other rank", "r1"] == now - 10 * SECOND
    assert times["ahead", "r0"] == now
    own = [int(line["timestamp"]) for line in lines if line["replica"] == "r0"]
    assert own == sorted(set(own))
    assert all(line.keys() == {"timestamp", "message", "replica", "request_id", "level"} for line in lines)

    early = await Written.of(timed)
    await early.print(0, 0, (at(clock, -40), "before it was created"))
    first, *_ = await early.client.lines(early.job, direction="asc")
    assert int(first["timestamp"]) >= at(clock) > created


async def test_pages__end_between_milliseconds_and_are_continued_as_truss_does(
    timed: MirrorUnderTest, clock: Clock
) -> None:
    """``train logs`` asks for 1,000 lines from ``created_at``, continues at the last millisecond + 1, and stops at an empty page."""
    job = await Written.of(timed, ranks=2)
    began = at(clock)
    clock.now += 40
    for batch in range(3):
        for rank in range(2):
            times = [began + (batch * 300 + number) // 3 * MILLI + number for number in range(300)]
            await job.print(rank, batch, *((time, f"{batch} {number}") for number, time in enumerate(times)))
    everything = await job.client.lines(job.job, direction="asc")
    assert len(everything) == 1800 + 2  # and the mirror's own
    page: list[Json] = []
    pages: list[list[Json]] = []
    start = began // MILLI
    while page or not pages:
        window = {"start_epoch_millis": start, "end_epoch_millis": start + 7_200_000}
        page = await job.client.lines(job.job, **window, limit=500, direction="asc")
        pages.append(page)
        start = int(page[-1]["timestamp"]) // MILLI + 1 if page else 0
    assert [line for page in pages for line in page] == everything
    assert [len(page) >= 500 for page in pages] == [True, True, True, False, False]
    (one,) = {int(line["timestamp"]) // MILLI for line in await job.client.lines(job.job, limit=1)}
    assert one == int(everything[-1]["timestamp"]) // MILLI


async def test_a_window_without_a_limit__is_whole_and_newest_first(timed: MirrorUnderTest, clock: Clock) -> None:
    """``--tail`` asks for the last minute, without limit or cursor."""
    job = await Written.of(timed)
    await job.print(0, 0, *((at(clock), f"old {number}") for number in range(900)))
    clock.now += 120
    await job.print(0, 1, *((at(clock, -30), f"new {number}") for number in range(1000)))
    await job.print(0, 2, *((at(clock, -20), f"newest {number}") for number in range(700)))
    tail = await job.client.lines(job.job, start_epoch_millis=at(clock, -60) // MILLI)
    assert [tail[0]["message"], tail[-1]["message"], len(tail)] == ["newest 699", "new 0", 1700]
    answer = await job.client.ask("GET", f"{job.job}/logs", start_epoch_millis=at(clock, -60) // MILLI, limit=10)
    assert answer.json()["logs"] == tail[:700]  # of one millisecond


async def test_an_answer_without_a_limit__has_the_newest_lines_of_a_long_window(
    timed: MirrorUnderTest, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bdn.mirror.training.logs.WINDOW_BYTES", 1000)
    job = await Written.of(timed)
    for seq in range(5):
        await job.print(0, seq, *((at(clock) + number * MILLI, f"{seq}{number}{'x' * 100}") for number in range(5)))
        clock.now += 1
    assert [text[:2] for text in await job.texts()] == [f"{seq}{number}" for seq in (3, 4) for number in range(5)]


async def test_a_long_log__drops_its_oldest_lines_and_counts_them(
    timed: MirrorUnderTest, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bdn.mirror.training.logs.LOG_BYTES", 20_000)
    job = await Written.of(timed)
    for seq in range(30):
        await job.print(0, seq, *((at(clock), f"{seq} {'x' * 90}") for _ in range(10)))
        clock.now += 1
    lines = await job.client.lines(job.job, direction="asc")
    notes = [line["message"] for line in lines if "dropped" in line["message"]]
    kept = [line["message"].split()[0] for line in lines if line["replica"] == "r0"]
    assert notes == [f"{300 - len(kept)} earlier lines were dropped: the log of a job holds at most 20 KB"]
    assert (lines[0]["message"], lines[0]["replica"]) == (notes[0], None)
    assert kept == [str(seq) for seq in range(30) for _ in range(10)][-len(kept) :]
    assert 100 < len(kept) < 200


@pytest.mark.skipif(not CLIENTS.exists(), reason="truss is not installed; make test installs it")
async def test_truss__shows_the_end_of_a_job_that_was_silent_for_three_hours(
    timed: MirrorUnderTest, clock: Clock, tmp_path: Path
) -> None:
    """It reads two hours at a time, and stops at an empty answer."""
    job = await Written.of(timed)
    await job.agents[0].report(f"run:{job.job}:0:stage", "STAGED")
    clock.now += 1
    await job.print(0, 0, (at(clock), "the beginning"))
    for _ in range(3 * 60):
        clock.now += 60
        await timed.service.controller.look()
    await job.print(0, 1, (at(clock), "the end"))
    await job.agents[0].report(f"run:{job.job}:0:go", "ENDED", exit_code=0)
    extra = {"PATH": f"{CLIENTS}:{os.environ['PATH']}", "TRUSS_NO_UPDATE_CHECK": "1", "COLUMNS": "200"}
    async with listening(timed.service.api) as url:
        shell = Shell(tmp_path / "user", {**extra, "BDN_URL": url}, is_forked=True)
        done = await asyncio.to_thread(shell.run, "bdn", "truss", "train", "logs", "--job-id", job.job)
    assert done.code == 0, done.out + done.err
    texts = [line.partition("]: ")[2] for line in done.out.splitlines() if line.startswith("[")]
    hourly = 2 * ["no output for an hour; the job is RUNNING"]
    assert texts[-5:] == ["(r0) the beginning", *hourly, "(r0) the end", "the job completed"]


async def test_a_process__forgets_how_much_the_logs_of_ended_jobs_grew(
    clock: Clock, upstreams: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Logs] = []

    def logs(database: Database) -> Logs:
        made.append(Logs(database))
        return made[0]

    monkeypatch.setattr("bdn.mirror.app.Logs", logs)
    async with mirror_under_test(tmp_path / "mirror", clock=clock, work=False) as mirror:
        ended = await Written.of(mirror)
        await ended.print(0, 0, (at(clock), "some output"))
        assert list(made[0]._unchecked) == [ended.job]
        await ended.agents[0].report(f"run:{ended.job}:0:stage", "ENDED", exit_code=1)
        active = await Written.of(mirror)
        await active.print(0, 0, (at(clock), "some output"))
        await active.agents[0].commanded("stage")
        assert list(made[0]._unchecked) == [active.job]


async def test_a_silent_job__gets_a_line_in_each_hour_and_its_log_goes_a_week_after_its_end(
    timed: MirrorUnderTest, clock: Clock
) -> None:
    job = await Written.of(timed)
    await job.agents[0].report(f"run:{job.job}:0:stage", "STAGED")
    before = len(await job.client.log(job.job))
    for _ in range(3 * 60):
        clock.now += 60
        await timed.service.controller.look()
    quiet = (await job.client.log(job.job))[before:]
    assert quiet == ["no output for an hour; the job is RUNNING"] * 2
    await job.client.ask("POST", f"{job.job}/stop", {})
    await job.agents[0].report(f"run:{job.job}:0:stop", "ENDED")
    assert (await job.client.log(job.job))[-1] == "the job was stopped"
    clock.now += 7 * 86400 - 60
    await timed.service.controller.look()
    assert await job.client.log(job.job) != []
    clock.now += 120
    await timed.service.controller.look()
    assert await job.client.log(job.job) == []
