"""docs/contract.md and docs/metrics.md say what the code offers, and nothing else."""

import importlib
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import jsonschema  # type: ignore[import-untyped]
import pytest
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from bdn.cli.output import exit_code_of
from bdn.core import errors
from bdn.core.errors import BdnError
from bdn.mirror.page.app import ROUTERS
from bdn.mirror.page.remedies import REMEDIES
from bdn.mirror.page.routes import VIEWS
from bdn.mirror.settings import MirrorSettings
from bdn.settings import ClientSettings
from bdn.wire.mirror_schema import Mirror, WeightsSourceBody
from bdn.wire.shapes import ErrorBody, ReportedError, status_of
from bdn.wire.stage_schema import StageDocument
from node_agent.csi.settings import CsiSettings
from node_agent.run.pod import PodSettings
from node_agent.settings import AgentSettings
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig
from tests.support.agent.site import serving_agent
from tests.support.mirror.service import MirrorUnderTest

pytest_plugins = ("tests.support.mirror.fixtures",)
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/contract.md").read_text()


@pytest.fixture
def agents_mirror() -> Iterator[AgentMirror]:
    with AgentMirror().running() as mirror:
        yield mirror


def rows(head: str) -> list[list[str]]:
    """The cells of the table that has these column names."""
    table = PAGE.split(f"| {head} |\n")[1].split("\n\n")[0]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()[1:]]


def quoted(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def routes(section: str) -> dict[str, tuple[set[str], set[str]]]:
    """Of each call its query and its body, from the section of one service."""
    found = re.findall(r"^\| `([A-Z]+ /\S*)` \| [^|]+ \|([^|]*)\|([^|]*)\|", section, re.MULTILINE)
    return {call: (quoted(query), quoted(body)) for call, query, body in found}


def offered(document: dict[str, Any]) -> dict[str, tuple[set[str], set[str]]]:
    """The same from an OpenAPI document."""

    def fields(operation: dict[str, Any]) -> set[str]:
        content = operation.get("requestBody", {"content": {}})["content"]
        names = [body["schema"]["$ref"].split("/")[-1] for body in content.values()]
        return {field for name in names for field in document["components"]["schemas"][name]["properties"]}

    return {
        f"{method.upper()} {path}": (
            {parameter["name"] for parameter in operation.get("parameters", []) if parameter["in"] == "query"},
            fields(operation),
        )
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }


def check_description(document: dict[str, Any], *some: str) -> None:
    """Each call has a name of its own, which a program can use, and an example that is right; so has the error document."""
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert set(some) <= set(names)
    assert all(re.fullmatch("[a-z]+(_[a-z0-9]+)+", name) for name in names)
    bodies = {
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        for operation in operations
        if "requestBody" in operation
    }
    for reference in (*bodies, "#/components/schemas/ErrorDocument"):
        (example,) = document["components"]["schemas"][reference.rsplit("/", 1)[1]]["examples"]
        jsonschema.validate(example, {"$ref": reference, "components": document["components"]})


async def test_every_call_of_the_mirror_has_its_row(idle: MirrorUnderTest) -> None:
    section = PAGE.split("\n## Mirror\n")[1].split("\n## ")[0]
    document = (await idle.http.get("/openapi.json")).json()
    assert routes(section) == offered(document)
    check_description(document, "post_mirror", "get_mirror_by_id_events", "head_chunks_by_digest")


def test_every_page_and_form_of_the_mirror_has_its_row() -> None:
    found = {
        (row[0].strip("`"), frozenset(quoted(row[2]))) for row in rows("page | role | query | form | shows or does")
    }
    views = {("GET " + view.path, frozenset(view.asked)) for view in VIEWS}
    offered = {
        f"{method} {route.path}"
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }
    live = {f"GET /ui/live/{view.name}" for view in VIEWS}

    assert views <= found
    assert live <= offered
    assert {call for call, _ in found} == offered - live | {"GET /ui/live/{view}"}


async def test_every_call_of_the_agent_has_its_row(agents_mirror: AgentMirror, tmp_path: Path) -> None:
    section = PAGE.split("\n## Agent\n")[1].split("\n## ")[0]
    async with serving_agent(Rig(agents_mirror, tmp_path)) as site:
        document = (await site.http.get("/openapi.json")).json()
    assert routes(section) == offered(document)
    check_description(document, "post_stages", "delete_stages_by_id", "get_metrics")


def test_the_headers_and_the_fields_of_a_source_are_those_of_the_wire() -> None:
    headers = {
        name for file in (ROOT / "bdn/wire").glob("*.py") for name in re.findall(r'"(BDN-[\w-]+)"', file.read_text())
    }

    assert {name for row in rows("header | of | means") for name in quoted(row[0])} == headers
    assert {name for row in rows("field | rule") for name in quoted(row[0])} == set(WeightsSourceBody.model_fields)


@pytest.mark.parametrize(("name", "model"), [("mirror", Mirror), ("stage", StageDocument)])
def test_an_example_is_a_document_with_all_of_its_fields(name: str, model: type[BaseModel]) -> None:
    example = PAGE.split(f"A {name} (")[1].split("```json\n")[1].split("```")[0]

    assert model.model_validate_json(example).model_dump(mode="json") == json.loads(example)


def options_of(command: click.Command) -> set[str]:
    always = {"--help", "--version", "--json", "--quiet"}
    return {name for option in command.params for name in option.opts if name.startswith("--")} - always


def commands() -> dict[str, set[str]]:
    """The options of each command, by its words."""
    found: dict[str, set[str]] = {}

    def walk(words: str, command: click.Command) -> None:
        if not isinstance(command, click.Group):
            found[words] = options_of(command)
            return
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            walk(f"{words} {name}", below)

    for program, place in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].items():
        module, _, attribute = place.partition(":")
        walk(program, getattr(importlib.import_module(module), attribute))
    return found


def test_every_command_has_its_row_with_its_options() -> None:
    documented = {
        re.split(r" [\[A-Z]", row[0].strip("`"))[0]: quoted(row[1]) for row in rows("command | options | does")
    }

    assert documented == commands()


def settings() -> set[str]:
    of_the_agent = (
        str(field.validation_alias or f"BDN_AGENT_{name.upper()}") for name, field in AgentSettings.model_fields.items()
    )
    of_the_driver = map(CsiSettings.variable, CsiSettings.model_fields)
    of_pods = map(PodSettings.variable, PodSettings.model_fields)
    return {f"BDN_{name.upper()}" for name in (*MirrorSettings.model_fields, *ClientSettings.model_fields)} | {
        "BDN_CONFIG",
        *of_the_agent,
        *of_the_driver,
        *of_pods,
    }


AMBIENT: Final = {
    "ALL_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
    "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE",
}  # fmt: skip


def test_every_setting_has_its_row() -> None:
    section = PAGE.split("\n## Settings\n")[1].split("\n## ")[0]
    documented = [
        name for row in re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    ]
    of_upstreams = set(re.findall(r'"([A-Z]+_[A-Z0-9_]+)"', (ROOT / "bdn/sources/settings.py").read_text()))

    assert sorted(documented) == sorted(settings() | of_upstreams | AMBIENT)


def codes() -> dict[str, type[BdnError]]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BdnError)]
    return {kind.code: kind for kind in kinds if "code" in vars(kind) and kind is not BdnError}


def reported(code: str) -> ReportedError:
    return ReportedError(ErrorBody(code=code, message="", retryable=False))


def test_every_error_has_its_row_with_its_status_and_whether_to_try_again() -> None:
    documented = {
        row[0].strip("`"): (int(row[1]), row[2][:2] != "no") for row in rows("code | status | retryable | means")
    }

    assert documented == {code: (status_of(reported(code)), kind.transient) for code, kind in codes().items()}


def test_the_page_has_the_remedy_of_every_error() -> None:
    assert {row[0].strip("`"): row[1] for row in rows("code | remedy")} == REMEDIES
    assert REMEDIES.keys() == codes().keys()


def test_an_operator_finds_every_error() -> None:
    table = (ROOT / "docs/operations.md").read_text().split("| code | what to do | look at |\n")[1].split("\n\n")[0]
    named = [code for line in table.splitlines()[1:] for code in sorted(quoted(line.split("|")[1]))]

    assert sorted(named) == sorted(codes())


def test_every_exit_code_names_the_errors_that_lead_to_it() -> None:
    for code, means in ((int(row[0]), row[1]) for row in rows("code | means")):
        named = set(re.findall(r"[A-Z]+_[A-Z_]+", means))
        assert code == 1 or named == {one for one in codes() if exit_code_of(reported(one)) == code}


# --- docs/metrics.md names what services really tell Prometheus, and nothing else ---
METRICS_PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text()


def documented(section: str) -> set[str]:
    rows = [
        row for row in METRICS_PAGE.split(f"## {section}\n")[1].split("\n## ")[0].splitlines() if row.startswith("| `")
    ]
    return {name for row in rows for name in re.findall(r"`((?:bdn|process)_\w+)`", row.split(" | ")[0])}


def told(text: str) -> set[str]:
    families = list(text_string_to_metric_families(text))
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


async def test_the_agents_metrics_are_documented(agents_mirror: AgentMirror, tmp_path: Path) -> None:
    async with Rig(agents_mirror, tmp_path).agent() as agent:
        text = agent.metrics.render(await agent.holdings.tiers()).decode()

    assert documented("Agent") == told(text)


async def test_the_mirrors_metrics_are_documented(idle: MirrorUnderTest) -> None:
    assert documented("Mirror") == told((await idle.http.get("/metrics")).text)


def test_every_statement_about_jobs_has_its_row_with_tests_and_figures_that_there_are() -> None:
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]+) \|$", (ROOT / "docs/statements.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 66))
    figures = re.findall(r"^## (.+)$", (ROOT / "docs/benchmarks.md").read_text(), re.MULTILINE)
    for number, shown in rows:
        tests = re.findall(r"`(tests/\S+?\.py)::(\w+)`", shown)
        sections = re.findall(r"\(benchmarks\.md#([\w-]+)\)", shown)
        assert tests or sections, number
        assert [(path, name) for path, name in tests if f"def {name}(" not in (ROOT / path).read_text()] == []
        assert set(sections) <= set(figures), number
