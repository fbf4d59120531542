"""The rules and the dashboards of ``deploy``: what they query."""

import json
import re
from typing import Any, Final

import yaml

from tests.support.services.commands import ROOT
from tests.support.services.prometheus import RULES

BOARDS: Final = ("fleet", "cluster", "node", "mirror")
FOREIGN: Final = {"up", "ALERTS"}  # of Prometheus itself
_VARIABLES: Final = {"$__rate_interval": "5m", "$cluster": "gpu", "$node": "gpu-17"}


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def board(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / f"deploy/grafana/{name}.json").read_text())
    return document


def queries(name: str) -> list[str]:
    """Each query of a board, with values for its variables."""
    return list(legends(name))


def legends(name: str) -> dict[str, set[str]]:
    """The labels that the legend of each query names."""
    found: dict[str, set[str]] = {}
    for target in (target for panel in board(name)["panels"] for target in panel["targets"]):
        query = target["expr"]
        for variable, value in _VARIABLES.items():
            query = query.replace(variable, value)
        found.setdefault(query, set()).update(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
    return found


def choices(name: str) -> list[tuple[str, str]]:
    """Of each variable with choices, the metric and the label whose values they are."""
    found = [one["query"]["query"] for one in board(name)["templating"]["list"] if one["type"] == "query"]
    return [(metric, label) for query in found for metric, label in re.findall(r"label_values\((\w+), (\w+)\)", query)]


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"bdn_[a-z_]+", text)) | {name for name in FOREIGN if re.search(rf"\b{name}\b", text)}
