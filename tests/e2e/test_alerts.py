"""A real Prometheus with our rules: it scrapes a mirror and an agent, and an alert fires when the agent is gone."""

import signal
from pathlib import Path

import httpx2
import yaml

from tests.support.network.ports import free_port
from tests.support.services.boards import BOARDS, choices, legends
from tests.support.services.commands import wait_until
from tests.support.services.prometheus import RULES, found, needs_prometheus, prometheus
from tests.support.services.services import agent, mirror

FIRING = 'ALERTS{alertname="BdnAgentGone", alertstate="firing"}'


def check_boards(http: httpx2.Client) -> None:
    """Prometheus evaluates each query without an error, and what it finds has the labels that the legend shows."""
    answered = 0
    for name in BOARDS:
        for query, labels in legends(name).items():
            series = found(http, query)
            answered += bool(series)
            assert all(labels <= labels_of.keys() for labels_of, _ in series), query
        for metric, label in choices(name):
            assert all(label in labels_of for labels_of, _ in found(http, metric)), (metric, label)
            assert found(http, metric), metric
    assert answered > 30


@needs_prometheus
def test_prometheus__when_an_agent_is_gone__fires_the_alert_that_names_it(tmp_path: Path) -> None:
    rules = yaml.safe_load(RULES.read_text())
    for rule in rules["groups"][0]["rules"]:
        rule["for"] = "0s"
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    at = f"127.0.0.1:{free_port()}"
    with mirror(tmp_path / "mirror") as serving, agent(tmp_path / "gpu-17", serving.url, BDN_AGENT_METRICS=at) as node:
        targets = {
            "bdn-mirror": {"mirror-a": serving.url.removeprefix("http://")},
            "bdn-agent": {"gpu-17": at},
        }
        with prometheus(tmp_path, targets, tmp_path / "rules.yml") as http:
            wait_until(lambda: found(http, "sum(up) == 2"), what="a scrape of both")
            wait_until(lambda: found(http, "bdn_mirror_database_up == 1"), what="the mirror's metrics")
            wait_until(lambda: found(http, 'bdn_agent_stages{instance="gpu-17"}'), what="the agent's metrics")
            wait_until(lambda: found(http, "bdn_agent_cluster_owners == 1"), what="the agent as its cluster's owner")
            assert found(http, FIRING) == []
            check_boards(http)

            node.process.send_signal(signal.SIGTERM)
            node.process.wait(120)

            wait_until(lambda: found(http, FIRING), what="the alert")
            ((labels, _),) = found(http, FIRING)
            assert (labels["instance"], labels["severity"]) == ("gpu-17", "warning")
            assert found(http, 'up{job="bdn-mirror"} == 1')
