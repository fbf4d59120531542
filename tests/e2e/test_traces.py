"""Traces of real mirrors, workers and agents, as a collector receives them over OTLP/HTTP."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from bdn.traces import spans
from bdn.traces.export import exporting
from bdn.wire.grants import new_signing_key
from tests.doubles.collector import Collector, Received
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.content.noise import MIB, noise
from tests.support.mirror.backends import write_keys
from tests.support.mirror.process import working
from tests.support.mirror.secret_search import Seen
from tests.support.mirror.service import mirror_under_test, source, until, with_secret
from tests.support.services.commands import Shell, wait_until
from tests.support.services.services import agent, mirror

pytest_plugins = ("tests.support.mirror.fixtures",)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER: Final = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=tracestate-of-a-caller"}
FILES: Final = 60
MODEL: Final = {f"{number}.safetensors": noise(MIB, number) for number in range(FILES)}
PROMPT: Final = {"OTEL_BSP_SCHEDULE_DELAY": "50"}  # milliseconds


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector().running() as collector:
        yield collector


def only(spans: list[Received]) -> Received:
    (found,) = spans
    return found


def check_batches(batches: list[Received], total: int) -> None:
    assert 1 < len(batches) <= spans.MOST_BATCHES
    assert sum(batch.attributes["bdn.bytes"] for batch in batches) == total
    assert sum(batch.attributes["bdn.parts"] for batch in batches) == FILES


def test_mirror_and_stage__of_a_caller_with_a_trace__are_one_trace_over_all_programs(
    collector: Collector, hub: Hub, tmp_path: Path
) -> None:
    hub.repo("org/private", private=True).commit(MODEL)
    traced = {"BDN_OTLP_ENDPOINT": collector.url}
    given = {"HF_ENDPOINT": hub.url, "BDN_SECRET_HUB_TOKEN": hub.token, **traced}
    with mirror(tmp_path / "mirror", **given) as serving, agent(tmp_path / "gpu-17", serving.url, **traced) as node:
        body = {"weights": [source("hf://org/private", **with_secret("hub-token"))]}
        begun = serving.http.post("/mirror", json=body, headers=CALLER).raise_for_status().json()
        ready = serving.http.get(f"/mirror/{begun['id']}", params={"wait": 60}).json()
        assert ready["status"] == "READY", ready
        wanted = {"job_id": "job-1", "grant": ready["grant"]}
        stage = node.http.post("/stages", json=wanted, headers=CALLER).raise_for_status().json()
        node.finished(stage["id"])

    total = FILES * MIB
    assert {span.trace for span in collector.spans} == {TRACE}
    posted, staged = only(collector.named("POST /mirror")), only(collector.named("POST /stages"))
    assert (posted.parent, posted.service) == (PARENT, "bdn-mirror")
    assert (staged.parent, staged.service) == (PARENT, "bdn-node-agent")
    assert (staged.process["bdn.node"], staged.process["bdn.cluster"]) == ("gpu-17", "default")

    work = only(collector.children(posted))
    assert (work.name, work.attributes["bdn.mirror"]) == ("mirror", begun["id"])
    copied = only(collector.children(work))
    assert (copied.name, copied.attributes["bdn.source"]) == ("source", "hf://org/private")
    assert [span.name for span in collector.children(copied)] == ["resolve", "list", "copy", "publish"]
    copy = only(collector.named("copy"))
    assert copy.attributes == {"bdn.files": FILES, "bdn.bytes": total}
    check_batches(collector.children(copy), total)
    manifest = ready["sources"][0]["manifest"]
    assert only(collector.named("publish")).attributes["bdn.manifest"] == manifest

    shown = only(collector.children(staged))
    assert (shown.name, shown.attributes["bdn.stage"], shown.attributes["bdn.job"]) == ("stage", stage["id"], "job-1")
    assert shown.attributes["bdn.from_mirror"] == total
    assert [span.name for span in collector.children(shown)] == ["manifests", "admit", "fill", "view"]
    check_batches(collector.children(only(collector.named("fill"))), total)
    served = only(collector.named("GET /manifests"))
    assert (served.service, served.parent) == ("bdn-mirror", only(collector.named("manifests")).id)

    seen = Seen()
    seen.answers.append(collector.text)
    secrets = [hub.token, ready["grant"], CALLER["tracestate"], MODEL["0.safetensors"][:8].hex()]
    assert seen.leaks(secrets) == []


async def test_mirror__whose_worker_is_killed__is_resumed_in_the_same_trace(
    collector: Collector, hub: Hub, upstreams: None, postgres_url: str, tmp_path: Path
) -> None:
    hub.repo("org/model").commit(MODEL)
    database: dict[str, Any] = {
        "database_url": postgres_url.replace("+asyncpg", ""),
        "store": f"file://{tmp_path}/store",
    }
    worker = {
        "BDN_DATABASE_URL": database["database_url"],
        "BDN_STORE": database["store"],
        "BDN_GRANT_KEY_FILE": str(write_keys(tmp_path / "grant-keys.pem", new_signing_key())),
        "BDN_OTLP_ENDPOINT": collector.url,
        **PROMPT,
    }
    hub.fail(stall(), origin="cdn", skip=5, times=None)
    replica = mirror_under_test(tmp_path / "api", work=False, **database)
    async with exporting(collector.url, "bdn-mirror"), replica as api:
        begun = (await api.begin(source("hf://org/model")))["id"]
        async with working(tmp_path / "killed", **worker):
            await until(lambda: collector.named("resolve"), "the first worker's spans")
        hub.release_stalled()
        async with working(tmp_path / "second", **worker) as second:
            document = (await api.http.get(f"/mirror/{begun}", params={"wait": 60})).json()
            second.send_signal(signal.SIGTERM)
            assert await second.wait() == 0
    assert document["status"] == "READY", document
    posted, work = only(collector.named("POST /mirror")), only(collector.named("mirror"))
    assert (work.trace, work.parent, work.service) == (posted.trace, posted.id, "bdn-worker")
    assert {span.trace for span in collector.named("resolve")} == {posted.trace}
    assert len(collector.named("resolve")) == 2


@pytest.fixture(params=["refuses", "is silent"])
def unreachable(request: pytest.FixtureRequest) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "is silent":
            listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_services__whose_collector_does_not_answer__work_warn_once_and_stop(
    unreachable: str, hub: Hub, tmp_path: Path
) -> None:
    hub.repo("org/model").commit({"config.json": b"{}"})
    traced = {"BDN_OTLP_ENDPOINT": unreachable, "OTEL_EXPORTER_OTLP_TIMEOUT": "1", **PROMPT}
    place = tmp_path / "mirror"
    log = place / "bdn-serve.log"
    warning = f"collector at BDN_OTLP_ENDPOINT={unreachable} takes no spans"
    with mirror(place, HF_ENDPOINT=hub.url, **traced) as serving, agent(tmp_path / "n", serving.url, **traced) as node:
        ready = serving.ready("hf://org/model")
        wait_until(lambda: warning in log.read_text(), what="the warning")
        for number in range(3):
            serving.ready("hf://org/model")
            node.stage(ready["grant"], f"job-{number}")
        stopped = [one.process for one in (node, serving)]
        for process in stopped:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(120) for process in stopped] == [0, 0]
    said = log.read_text()
    assert said.count(warning) == 1
    assert "logger=opentelemetry" not in said


def test_service__with_an_endpoint_that_is_no_address__is_refused(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    for address in ("collector:4318", "http://user:secret-of-it@collector:4318", "http://collector:4318?key=value"):
        for command in (("bdn", "serve"), ("bdn-node-agent",)):
            ended = shell.run(*command, BDN_OTLP_ENDPOINT=address)
            assert ended.code == 2, ended.err
            assert "BDN_OTLP_ENDPOINT: must be an http or https address" in ended.err
