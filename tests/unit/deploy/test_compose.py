"""docker-compose.yml cannot be run here, so everything that it names is held against the code."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from bdn.cli.clients import ClientSettings
from bdn.mirror.settings import MirrorSettings
from bdn.mirror.store_opener import open_store
from node_agent.settings import AgentSettings, load_settings

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()

FOREIGN_VARIABLES = {"AWS_ENDPOINT_URL_S3"}  # docs/contract.md: honoured as they are


def test_the_file_names_every_part_of_the_system() -> None:
    assert set(SERVICES) == {"postgres", "s3", "migrate", "mirror", "worker", "agent-a", "agent-b"}


def test_every_image_is_ours_or_one_of_the_two_stores() -> None:
    foreign = {service["image"].partition(":")[0] for service in SERVICES.values() if "image" in service}

    assert foreign == {"postgres", "minio/minio"}
    for service in OURS.values():
        assert service["build"] == {"context": ".", "dockerfile": "deploy/Dockerfile"}
        assert "image" not in service


@pytest.mark.parametrize("name", OURS)
def test_every_command_exists_and_takes_its_arguments(name: str) -> None:
    program, *arguments = OURS[name]["command"]
    module, _, attribute = PROJECT["scripts"][program].partition(":")
    command = getattr(importlib.import_module(module), attribute)

    assert isinstance(command, click.Command)
    context = command.make_context(program, list(arguments), resilient_parsing=False)
    if isinstance(command, click.Group):
        _, found, rest = command.resolve_command(context, list(arguments))
        assert found is not None
        found.make_context(arguments[0], rest)


@pytest.mark.parametrize("name", OURS)
def test_every_variable_is_a_setting(name: str) -> None:
    known = {f"BDN_{field.upper()}" for field in (*MirrorSettings.model_fields, *ClientSettings.model_fields)}
    known |= {f"BDN_AGENT_{field.upper()}" for field in AgentSettings.model_fields} | FOREIGN_VARIABLES

    for variable in OURS[name]["environment"]:
        assert variable in known or variable.startswith("BDN_SECRET_"), variable


def test_the_mirrors_settings_are_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable, value in OURS["mirror"]["environment"].items():
        monkeypatch.setenv(variable, value)
    settings = MirrorSettings(store=f"file://{tmp_path}/store")

    assert settings.auth == "token"
    assert settings.token
    assert not settings.is_embedded
    open_store(settings.effective_store, exclusive=False)
    assert OURS["mirror"]["environment"]["BDN_STORE"].startswith("file:///")


@pytest.mark.parametrize("name", ["agent-a", "agent-b"])
def test_the_agents_settings_are_accepted_and_find_the_mirror(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in OURS[name]["environment"].items():
        monkeypatch.setenv(variable, value)
    settings = AgentSettings()

    assert settings.node == name
    assert settings.cache_bytes == 20_000_000_000
    url = OURS[name]["environment"]["BDN_URL"]
    assert url == f"http://mirror:{OURS['mirror']['environment']['BDN_PORT']}"


@pytest.mark.parametrize("name", ["agent-a", "agent-b"])
def test_the_agents_find_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On loopback, which is the default, each would take itself for the other."""
    for variable, value in OURS[name]["environment"].items():
        monkeypatch.setenv(variable, value)
    settings = load_settings()

    assert settings.advertise == f"http://{name}:{settings.data_port}"
    assert (settings.host, settings.auth) == ("0.0.0.0", "token")
    assert len({OURS[agent]["environment"]["BDN_AGENT_CLUSTER"] for agent in ("agent-a", "agent-b")}) == 1


def test_the_published_ports_are_the_ones_that_the_mirror_listens_on() -> None:
    environment = OURS["mirror"]["environment"]
    published = [port.split(":")[-1] for port in OURS["mirror"]["ports"]]

    assert published == [environment["BDN_PORT"], environment["BDN_DATA_PORT"]]
    fields = MirrorSettings.model_fields
    assert published == [str(fields["port"].default), str(fields["data_port"].default)]
    assert all(port.startswith("127.0.0.1:") for service in SERVICES.values() for port in service.get("ports", []))


def test_every_volume_is_declared_and_every_dependency_exists() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in COMPOSE["volumes"]
        assert set(service.get("depends_on", {})) <= set(SERVICES)


def test_the_image_builds_from_the_lock_file_and_from_files_that_exist() -> None:
    assert "--require-hashes -r requirements/runtime.txt" in DOCKERFILE
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE):
        *sources, _ = shlex.split(line)
        for source in sources:
            assert (ROOT / source).exists(), source


def test_the_image_exposes_the_ports_of_the_contract() -> None:
    exposed = re.findall(r"^EXPOSE (.+)$", DOCKERFILE, re.MULTILINE)[0].split()
    mirror, agent = MirrorSettings.model_fields, AgentSettings.model_fields

    assert exposed == [str(mirror["port"].default), str(mirror["data_port"].default), str(agent["data_port"].default)]
