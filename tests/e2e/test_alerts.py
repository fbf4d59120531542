"""A real Prometheus with our rules: it scrapes a mirror and an agent, and an alert fires when the agent is gone."""

import signal
from pathlib import Path

import yaml

from tests.support.network.ports import free_port
from tests.support.services.commands import wait_until
from tests.support.services.prometheus import RULES, found, needs_prometheus, prometheus
from tests.support.services.services import agent, mirror

FIRING = 'ALERTS{alertname="BdnAgentGone", alertstate="firing"}'


@needs_prometheus
def test_prometheus__when_an_agent_is_gone__fires_the_alert_that_names_it(tmp_path: Path) -> None:
    rules = yaml.safe_load(RULES.read_text())
    for rule in rules["groups"][0]["rules"]:
        rule["for"] = "0s"
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    port = str(free_port())
    with mirror(tmp_path / "mirror") as serving, agent(tmp_path / "gpu-17", serving.url, BDN_AGENT_PORT=port) as node:
        targets = {
            "bdn-mirror": {"mirror-a": serving.url.removeprefix("http://")},
            "bdn-agent": {"gpu-17": f"127.0.0.1:{port}"},
        }
        with prometheus(tmp_path, targets, tmp_path / "rules.yml") as http:
            wait_until(lambda: found(http, "sum(up) == 2"), what="a scrape of both")
            wait_until(lambda: found(http, "bdn_mirror_database_up == 1"), what="the mirror's metrics")
            wait_until(lambda: found(http, 'bdn_agent_stages{instance="gpu-17"}'), what="the agent's metrics")
            wait_until(lambda: found(http, "bdn_agent_cluster_owners == 1"), what="the agent as its cluster's owner")
            assert found(http, FIRING) == []

            node.process.send_signal(signal.SIGTERM)
            node.process.wait(120)

            wait_until(lambda: found(http, FIRING), what="the alert")
            ((labels, _),) = found(http, FIRING)
            assert (labels["instance"], labels["severity"]) == ("gpu-17", "warning")
            assert found(http, 'up{job="bdn-mirror"} == 1')
