"""Spans as a collector receives them: how many, of what, and what they never hold."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from threading import Event

import pytest

from bdn.core.errors import InvalidRequestError, StoreUnavailableError
from bdn.traces import spans
from bdn.traces.export import exporting
from bdn.traces.otlp import OtlpTracer
from tests.doubles.collector import Collector

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
SIGNED = "https://bucket.example/chunk?X-Amz-Signature=0123456789abcdef"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector().running() as collector:
        yield collector


async def test_spans__in_tasks_of_one_piece_of_work__are_its_children(collector: Collector) -> None:
    async def step(number: int) -> None:
        with spans.span("step", number=number):
            await asyncio.sleep(0)

    async with exporting(collector.url, "bdn-test", node="gpu-1"):
        with spans.work("work", SAMPLED, stage="stg_1") as work:
            async with asyncio.TaskGroup() as group:
                for number in range(3):
                    group.create_task(step(number))
            work.set(bytes=5)

    (work_span,) = collector.named("work")
    assert (work_span.trace, work_span.parent, work_span.service) == (TRACE, PARENT, "bdn-test")
    assert work_span.attributes == {"bdn.stage": "stg_1", "bdn.bytes": 5}
    assert work_span.process["bdn.node"] == "gpu-1"
    assert {span.attributes["bdn.number"] for span in collector.children(work_span)} == {0, 1, 2}
    assert set(collector.paths) == {"/v1/traces"}


async def test_traceparent__inside_a_span__continues_it_and_outside_is_none(collector: Collector) -> None:
    async with exporting(collector.url, "bdn-test"):
        assert spans.traceparent() is None
        with spans.request("GET /x", None):
            sent = spans.traceparent()
    (span,) = collector.named("GET /x")
    assert sent is not None
    assert sent.startswith(f"00-{span.trace}-{span.id}-")


@pytest.mark.parametrize(
    "hostile", ["", "garbage", "00-" + "0" * 32 + f"-{PARENT}-01", "é" * 600, f"ff-{TRACE}-{PARENT}-01"]
)
async def test_request__with_a_traceparent_that_is_none__begins_a_trace(collector: Collector, hostile: str) -> None:
    async with exporting(collector.url, "bdn-test"):
        with spans.request("POST /mirror", hostile):
            pass
    (span,) = collector.named("POST /mirror")
    assert (span.parent, span.trace != TRACE) == ("", True)


async def test_joined__without_a_traceparent__is_no_span(collector: Collector) -> None:
    async with exporting(collector.url, "bdn-test"):
        with spans.joined("GET /manifests", None):
            pass
        with spans.joined("GET /manifests", SAMPLED, manifest="b3:1"):
            pass
    assert [span.parent for span in collector.spans] == [PARENT]


async def test_work__with_more_spans_than_its_bound__says_how_many_are_left_out(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10000")
    async with exporting(collector.url, "bdn-test"):
        with spans.work("work"):
            for _ in range(1000):
                with spans.span("step"), spans.batches("chunks", 1) as traced:
                    traced.add(1)
        with spans.work("next"), spans.span("step of next"):
            pass
    (work,) = collector.named("work")
    assert work.attributes["bdn.spans_left_out"] == 2001 - 500
    assert len([span for span in collector.spans if span.trace == work.trace]) == 500
    assert len(collector.named("step of next")) == 1


@pytest.mark.parametrize(("parts", "most"), [(1, 1), (10, 10), (100_000, spans.MOST_BATCHES)])
async def test_batches__of_any_number_of_parts__are_a_few_spans_without_gaps(
    collector: Collector, parts: int, most: int
) -> None:
    async with exporting(collector.url, "bdn-test"):
        with spans.work("fill"), spans.batches("chunks", 3 * parts) as traced:
            for number in range(2 * parts):  # twice as many as announced: half of them are requested again
                traced.add(3, "mirror" if number % 2 else "cluster")
    (fill,) = collector.named("fill")
    found = collector.children(fill)
    assert 1 <= len(found) <= 2 * most
    assert len(found) <= spans.MOST_BATCHES
    assert sum(span.attributes["bdn.parts"] for span in found) == 2 * parts
    by_tier = {
        name: sum(span.attributes.get(f"bdn.{name}", 0) for span in found)
        for name in ("bytes", "from_mirror", "from_cluster")
    }
    assert by_tier == {"bytes": 6 * parts, "from_mirror": 3 * parts, "from_cluster": 3 * parts}


async def test_batches__completed_by_a_task_of_another_trace__belong_to_the_span_in_which_they_began(
    collector: Collector,
) -> None:
    async with exporting(collector.url, "bdn-test"):
        with spans.work("mine"), spans.batches("chunks", 1) as traced, spans.work("other", SAMPLED):
            traced.add(1)
    (mine,), (batch,) = collector.named("mine"), collector.named("chunks")
    assert (batch.trace, batch.parent) == (mine.trace, mine.id)


async def test_span__of_a_failure__has_its_code_and_not_its_message(collector: Collector) -> None:
    async with exporting(collector.url, "bdn-test"):
        with pytest.raises(StoreUnavailableError), spans.work("mirror"), spans.span("copy"):
            raise StoreUnavailableError(f"cannot read {SIGNED}")
    for name in ("copy", "mirror"):
        (span,) = collector.named(name)
        assert (span.status, span.attributes) == (2, {"error.type": "STORE_UNAVAILABLE"})
    assert "X-Amz" not in collector.text


async def test_attribute__of_a_hostile_length__is_cut(collector: Collector) -> None:
    async with exporting(collector.url, "bdn-test"):
        with spans.work("stage", job="j" * 100_000):
            pass
    (span,) = collector.named("stage")
    assert len(span.attributes["bdn.job"]) <= 500


@pytest.mark.parametrize(
    ("sampler", "parent", "count"),
    [
        ({}, UNSAMPLED, 0),  # the caller's decision
        ({"OTEL_TRACES_SAMPLER": "always_on"}, UNSAMPLED, 1),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, SAMPLED, 0),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, None, 0),
    ],
)
async def test_sampling__is_what_the_standard_variables_say(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, sampler: dict[str, str], parent: str | None, count: int
) -> None:
    for name, value in sampler.items():
        monkeypatch.setenv(name, value)
    async with exporting(collector.url, "bdn-test"):
        with spans.work("mirror", parent), spans.batches("chunks", 1) as traced:
            traced.add(1)
    assert len(collector.named("mirror")) == len(collector.named("chunks")) == count


async def test_service_name__of_the_operator__wins(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "weights")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    async with exporting(collector.url, "bdn-test"):
        with spans.work("mirror"):
            pass
    (span,) = collector.spans
    assert (span.service, span.process["deployment.environment"]) == ("weights", "test")


async def test_exporting__without_the_sdk__is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "bdn.traces.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidRequestError, match=r"BDN_OTLP_ENDPOINT needs .* install bdn\[traces\]"):
        async with exporting("http://127.0.0.1:4318", "bdn-test"):
            pass


async def test_exporting__to_a_collector_that_hangs__ends_without_its_answer(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = Event()
    monkeypatch.setattr(OtlpTracer, "close", lambda _: answered.wait())
    try:
        async with asyncio.timeout(120), exporting(collector.url, "bdn-test"):
            pass
        assert not answered.is_set()
    finally:
        answered.set()


async def test_spans__without_an_exporter__do_nothing() -> None:
    async with exporting(None, "bdn-test"):
        with spans.work("mirror") as work, spans.span("copy"), spans.batches("chunks", 1) as traced:
            work.set(bytes=1)
            traced.add(1)
            assert spans.traceparent() is None


def test_programs__without_an_endpoint__do_not_import_the_sdk() -> None:
    code = (
        "import sys, bdn.cli.serve, bdn.cli.pull, node_agent.daemon\n"
        "print(*(name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == ""
