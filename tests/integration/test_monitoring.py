"""Rules and boards against a real mirror and a real agent: their metrics exist, and promtool finds nothing wrong with them."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bdn.wire.grants import new_signing_key
from node_agent.api import serving_api
from tests.doubles.hub import Hub
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig
from tests.support.mirror.backends import write_keys
from tests.support.mirror.process import working
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source
from tests.support.network.ports import free_port
from tests.support.services.boards import BOARDS, FOREIGN, alerts, choices, metrics_in, queries
from tests.support.services.prometheus import needs_promtool, promtool

pytest_plugins = ("tests.support.mirror.fixtures",)


@pytest.fixture
async def pages(idle: MirrorUnderTest, tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """What a mirror and an agent answer at /metrics."""
    with AgentMirror().running() as agents_mirror:
        async with Rig(agents_mirror, tmp_path).agent() as agent:
            yield {
                "mirror": (await idle.http.get("/metrics")).raise_for_status().text,
                "agent": agent.metrics.render(await agent.holdings.tiers()).decode(),
            }


async def test_rules_and_boards__query_only_metrics_that_a_mirror_or_an_agent_has(pages: dict[str, str]) -> None:
    had = {
        name
        for page in pages.values()
        for family in text_string_to_metric_families(page)
        for name in (family.name, *(family.name + end for end in ("_total", "_bucket", "_count", "_sum")))
        if family.name.startswith("bdn_")
    }
    asked = {rule["alert"]: metrics_in(rule["expr"]) for rule in alerts()}
    asked |= {name: metrics_in(" ".join(queries(name))) for name in BOARDS}
    asked |= {f"variables of {name}": {metric for metric, _ in choices(name)} for name in BOARDS if choices(name)}
    assert all(asked.values())
    assert {name: metrics - had - FOREIGN for name, metrics in asked.items() if metrics - had - FOREIGN} == {}


@needs_promtool
async def test_metrics_of_a_mirror_and_an_agent__checked_by_promtool__are_clean(pages: dict[str, str]) -> None:
    for page in pages.values():
        assert promtool("check", "metrics", given=page) == (0, "")


async def test_metrics__have_only_labels_with_a_few_values_and_their_process(pages: dict[str, str]) -> None:
    """A node, a job, a source or an organisation as a label would make a series for each of them."""
    bounded = {"cluster", "delivery", "le", "outcome", "phase", "reason", "state", "status", "tier", "version"}
    for page in pages.values():
        families = list(text_string_to_metric_families(page))
        assert {label for family in families for sample in family.samples for label in sample.labels} <= bounded
        process = {
            "process_cpu_seconds",
            "process_resident_memory_bytes",
            "process_open_fds",
            "process_start_time_seconds",
        }
        assert process <= {family.name for family in families}


async def test_histograms__reach_from_well_below_to_well_above_what_is_usual(pages: dict[str, str]) -> None:
    """A stage takes from 0.1 s to half an hour, a phase of a job from a second to a day."""
    bounds = {
        sample.name.removesuffix("_bucket"): float(sample.labels["le"])
        for page in pages.values()
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.labels.get("le", "+Inf") != "+Inf"
    }
    assert bounds["bdn_agent_ready_seconds"] >= 3600


async def _pieces() -> AsyncIterator[bytes]:
    """A body without an announced length."""
    yield b"{}"


async def test_agent__at_the_address_of_its_metrics__serves_probes_and_nothing_else(tmp_path: Path) -> None:
    port = free_port()
    with AgentMirror().running() as agents_mirror:
        rig = Rig(agents_mirror, tmp_path, {"metrics": ("127.0.0.1", port)})
        async with rig.agent() as agent, serving_api(agent), httpx2.AsyncClient(trust_env=False) as http:
            at = f"http://127.0.0.1:{port}"
            for path in ("/metrics", "/healthz", "/readyz"):
                assert (await http.get(f"{at}{path}")).status_code == 200
            assert "bdn_agent_stages" in (await http.get(f"{at}/metrics")).text
            for path in ("/stages", "/cache", "/events", "/job-volumes", "/shared-caches"):
                assert (await http.get(f"{at}{path}")).status_code == 404
            for path in ("/stages", "/pulls", "/verifications", "/metrics"):
                assert (await http.post(f"{at}{path}", json={"job_id": "j", "grant": "g"})).status_code == 413
                assert (await http.post(f"{at}{path}", content=_pieces())).status_code == 401
            assert (await http.delete(f"{at}/stages/stg_1")).status_code == 404


async def test_worker__at_the_address_of_its_metrics__serves_those_of_its_mirrors(
    hub: Hub, upstreams: None, postgres_url: str, tmp_path: Path
) -> None:
    hub.repo("org/model").commit({"model.bin": b"12345678"})
    address = f"127.0.0.1:{free_port()}"
    database: dict[str, Any] = {
        "database_url": postgres_url.replace("+asyncpg", ""),
        "store": f"file://{tmp_path}/store",
    }
    environment = {
        "BDN_DATABASE_URL": database["database_url"],
        "BDN_STORE": database["store"],
        "BDN_GRANT_KEY_FILE": str(write_keys(tmp_path / "grant-keys.pem", new_signing_key())),
        "BDN_WORKER_METRICS": address,
    }
    async with (
        mirror_under_test(tmp_path / "api", work=False, **database) as api,
        working(tmp_path / "worker", **environment) as worker,
        httpx2.AsyncClient(base_url=f"http://{address}", trust_env=False) as http,
    ):
        await api.ready(source("hf://org/model"))
        page = (await http.get("/metrics")).raise_for_status().text
        assert "bdn_mirror_transferred_bytes_total 8.0" in page
        assert (await http.get("/readyz")).status_code == 200
        assert (await http.get("/mirror")).status_code == 404
        assert (await http.post("/mirror", json={"weights": []})).status_code == 413
        worker.send_signal(signal.SIGTERM)
        assert await worker.wait() == 0


async def test_metrics_of_damage__before_the_first__are_0_for_an_increase_to_be_seen(pages: dict[str, str]) -> None:
    for tier in ("node", "cluster"):
        for outcome in ("damaged", "repaired", "lost"):
            assert f'bdn_agent_damaged_chunks_total{{outcome="{outcome}",tier="{tier}"}} 0.0' in pages["agent"]
