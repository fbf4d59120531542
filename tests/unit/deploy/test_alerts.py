"""deploy/prometheus and deploy/grafana: promtool accepts and tries each rule and query, and each alert has its runbook."""

import importlib
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, Final

import click
import pytest
import yaml

from tests.support.services.boards import BOARDS, alerts, board, queries
from tests.support.services.commands import ROOT
from tests.support.services.prometheus import RULES, needs_promtool, promtool

SCENARIOS: Final = Path(__file__).parent / "alerts"
NAMES: Final = [rule["alert"] for rule in alerts()]
PAGE: Final = (ROOT / "docs/operations.md").read_text()
CHAPTER: Final = PAGE.split("\n## Alerts\n")[1].split("\n## ")[0]
CORE_PANELS: Final = {"stat", "table", "timeseries"}  # part of Grafana itself
SCRIPTS: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: str) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}


# --- rules ---


@needs_promtool
def test_rules__checked_by_promtool__are_valid() -> None:
    code, said = promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    assert code == 0, said


@needs_promtool
@pytest.mark.parametrize("name", NAMES)
def test_alert__in_its_scenarios__fires_when_it_should_and_not_otherwise(name: str) -> None:
    code, said = promtool("test", "rules", str(SCENARIOS / f"{name}.yml"))
    assert code == 0, said


@pytest.mark.parametrize("name", NAMES)
def test_scenarios_of_an_alert__show_it_firing_and_silent(name: str) -> None:
    cases = [
        case
        for group in yaml.safe_load((SCENARIOS / f"{name}.yml").read_text())["tests"]
        for case in group["alert_rule_test"]
    ]
    assert {case["alertname"] for case in cases} == {name}
    assert {bool(case["exp_alerts"]) for case in cases} == {True, False}


def test_scenarios__without_an_alert__do_not_exist() -> None:
    assert sorted(path.stem for path in SCENARIOS.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("rule", alerts(), ids=NAMES)
def test_alert__names_severity_thing_and_runbook(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert re.search(r"\{\{ \$labels\.(instance|job|cluster) \}\}", rule["annotations"]["summary"])
    path, _, section = rule["annotations"]["runbook_url"].partition("#")
    assert (path, section) == ("docs/operations.md", anchor(rule["alert"]))
    assert section in anchors(PAGE)


# --- runbook ---


def test_runbook__has_a_section_for_each_alert_and_no_other() -> None:
    assert sorted(re.findall(r"^### (.+)$", CHAPTER, re.MULTILINE)) == sorted(NAMES)


def test_runbook__links_lead_to_files_and_sections_that_exist() -> None:
    links = re.findall(r"\]\(([^)]+)\)", CHAPTER)
    assert links
    for link in links:
        path, _, section = link.partition("#")
        target = ROOT / "docs" / path if path else ROOT / "docs/operations.md"
        assert target.exists(), link
        assert not section or section in anchors(target.read_text()), link


def loaded(script: str) -> click.Command:
    module, _, name = SCRIPTS[script].partition(":")
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, click.Command)
    return found


def test_runbook__names_commands_and_options_that_exist() -> None:
    lines = [line for line in re.findall(r"`(bdn[a-z-]* [^`]+)`", CHAPTER) if line.split()[0] in {"bdn", "bdn-admin"}]
    assert len(lines) > len(NAMES)
    for line in lines:
        program, *words = shlex.split(line)
        command = loaded(program)
        while isinstance(command, click.Group) and words:
            found = command.get_command(click.Context(command), words.pop(0))
            assert found is not None, line
            command = found
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


# --- boards ---


@pytest.mark.parametrize("name", BOARDS)
def test_board__is_of_grafana_10_needs_no_plugin_and_leaves_the_data_source_open(name: str) -> None:
    document = board(name)
    assert (document["uid"], document["schemaVersion"]) == (f"bdn-{name}", 38)
    assert document["templating"]["list"][0]["type"] == "datasource"
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = document["panels"]
    assert {panel["type"] for panel in panels} <= CORE_PANELS
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    for panel in panels:
        assert panel["title"]
        assert panel["description"]
        assert {panel["datasource"]["uid"], *(one["datasource"]["uid"] for one in panel["targets"])} == {source["uid"]}


@pytest.mark.parametrize("name", BOARDS)
def test_board__units_of_bytes_and_seconds_are_those_of_their_metrics(name: str) -> None:
    measured = {"bytes": "_bytes", "Bps": "_bytes", "s": "_seconds"}
    for panel in board(name)["panels"]:
        config = panel["fieldConfig"]
        own = {
            one["matcher"]["options"]: each["value"]
            for one in config["overrides"]
            for each in one["properties"]
            if each["id"] == "unit"
        }
        for target in panel["targets"]:
            unit = own.get(target["legendFormat"], config["defaults"].get("unit"))
            assert measured.get(unit, "") in target["expr"], (panel["title"], target["expr"])


@pytest.mark.parametrize("name", BOARDS)
def test_board__panels_do_not_overlap(name: str) -> None:
    cells = [
        (x, y)
        for panel in board(name)["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@needs_promtool
@pytest.mark.parametrize("name", BOARDS)
def test_board__queries_are_valid(name: str, tmp_path: Path) -> None:
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries(name))]
    assert not [rule["expr"] for rule in rules if "$" in rule["expr"]]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    code, said = promtool("check", "rules", str(tmp_path / "rules.yml"))
    assert code == 0, said
