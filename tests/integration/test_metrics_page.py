"""docs/metrics.md names what services really tell Prometheus, and nothing else."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig
from tests.support.mirror.service import MirrorUnderTest

pytest_plugins = ("tests.support.mirror.fixtures",)

PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text()


@pytest.fixture
def agents_mirror() -> Iterator[AgentMirror]:
    with AgentMirror().running() as mirror:
        yield mirror


def documented(section: str) -> set[str]:
    rows = [row for row in PAGE.split(f"## {section}\n")[1].split("\n## ")[0].splitlines() if row.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(bdn_\w+)`", row.split(" | ")[0])}


def told(text: str) -> set[str]:
    """Without the moments at which counters began, which the client library adds."""
    families = [family for family in text_string_to_metric_families(text) if not family.name.endswith("_created")]
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


async def test_the_agents_metrics_are_documented(agents_mirror: AgentMirror, tmp_path: Path) -> None:
    async with Rig(agents_mirror, tmp_path).agent() as agent:
        text = agent.metrics.render(await agent.holdings.tiers()).decode()

    assert documented("Agent") == told(text)


async def test_the_mirrors_metrics_are_documented(idle: MirrorUnderTest) -> None:
    assert documented("Mirror") == told((await idle.http.get("/metrics")).text)
