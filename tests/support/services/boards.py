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
    found = [target["expr"] for panel in board(name)["panels"] for target in panel["targets"]]
    for variable, value in _VARIABLES.items():
        found = [query.replace(variable, value) for query in found]
    return found


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"bdn_[a-z_]+", text)) | {name for name in FOREIGN if re.search(rf"\b{name}\b", text)}
