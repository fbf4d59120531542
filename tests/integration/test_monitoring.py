"""Rules and boards against a real mirror and a real agent: their metrics exist, and promtool finds nothing wrong with them."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig
from tests.support.mirror.service import MirrorUnderTest
from tests.support.services.boards import BOARDS, FOREIGN, alerts, metrics_in, queries
from tests.support.services.prometheus import needs_promtool, promtool

pytest_plugins = ("tests.support.mirror.fixtures",)
# docs/metrics.md is a contract: names that promtool would choose otherwise stay.
TOLERATED: Final[set[str]] = set()


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
    assert all(asked.values())
    assert {name: metrics - had - FOREIGN for name, metrics in asked.items() if metrics - had - FOREIGN} == {}


@needs_promtool
async def test_metrics_of_a_mirror_and_an_agent__checked_by_promtool__are_clean(pages: dict[str, str]) -> None:
    for page in pages.values():
        _, said = promtool("check", "metrics", given=page)
        assert {line for line in said.splitlines() if not re.match(r"\S+_created ", line)} - TOLERATED == set()


async def test_metrics_of_damage__before_the_first__are_0_for_an_increase_to_be_seen(pages: dict[str, str]) -> None:
    for tier in ("node", "cluster"):
        for outcome in ("damaged", "repaired", "lost"):
            assert f'bdn_agent_damaged_chunks_total{{outcome="{outcome}",tier="{tier}"}} 0.0' in pages["agent"]
