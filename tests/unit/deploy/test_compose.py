"""docker-compose.yml and the Dockerfile need a container engine, which tests do not start: all that they name is compared with the code."""

import importlib
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from bdn.core.source.uri import parse_source
from bdn.mirror.db.database import database_url
from bdn.mirror.settings import MirrorSettings
from bdn.settings import ClientSettings
from bdn.sources.sign_in import Secret, s3_credentials
from node_agent.settings import AgentSettings, load_settings

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
AGENTS = ["agent-a", "agent-b"]
REPLICAS = ["mirror-a", "mirror-b"]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
FOREIGN_VARIABLES = {"AWS_ENDPOINT_URL_S3"}  # docs/contract.md: honoured as they are
SECRETS = ("BDN_SECRET_", "BDN_INFRASTRUCTURE_SECRET_")
PORTS = [str(MirrorSettings.model_fields[field].default) for field in ("port", "data_port")]


def in_the_environment_of(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    environment: dict[str, str] = OURS[name]["environment"]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, re.sub(r"\$\{\w+:\?[^}]*\}", "given", value))
    return environment


def test_every_part_is_named_with_its_image_its_volumes_and_what_it_waits_for() -> None:
    once = {"bucket", "migrate", "keys"}
    assert set(SERVICES) == {"postgres", "pgbouncer", "s3", "mirror", *once, *REPLICAS, "worker-a", "worker-b", *AGENTS}
    assert {name for name, service in SERVICES.items() if service.get("restart") == "no"} == once
    for service in SERVICES.values():
        assert service.get("build") in (None, {"context": ".", "dockerfile": "deploy/Dockerfile"})
        assert ("build" in service) != ("image" in service)
        assert {volume.partition(":")[0] for volume in service.get("volumes", [])} <= set(COMPOSE["volumes"])
        assert {one["source"] for one in service.get("configs", [])} <= set(COMPOSE["configs"])
        assert set(service.get("depends_on") or {}) <= set(SERVICES)


@pytest.mark.parametrize("name", OURS)
def test_every_command_takes_its_arguments_and_every_variable_is_a_setting(name: str) -> None:
    program, *arguments = OURS[name]["command"]
    if program == "sh":
        program, *arguments = "bdn", "migrate"  # only its variables are ours
    module, _, attribute = SCRIPTS[program].partition(":")
    command = getattr(importlib.import_module(module), attribute)
    if isinstance(command, click.Group):
        _, command, arguments = command.resolve_command(click.Context(command), arguments)
    command.make_context(program, list(arguments))

    known = {f"BDN_{field.upper()}" for field in (*MirrorSettings.model_fields, *ClientSettings.model_fields)}
    known |= {f"BDN_AGENT_{field.upper()}" for field in AgentSettings.model_fields} | FOREIGN_VARIABLES
    assert {one for one in OURS[name]["environment"] if not one.startswith(SECRETS)} <= known


def test_the_mirrors_settings_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = in_the_environment_of("mirror-a", monkeypatch)
    settings = MirrorSettings()

    assert (settings.auth, bool(settings.token), settings.is_embedded) == ("token", True, False)
    assert settings.grant_key_file is not None  # or it would not start
    through = database_url(settings.effective_database_url)
    assert (through.host, through.query["statement_cache_size"]) == ("pgbouncer", "0")
    store = parse_source(settings.effective_store)
    assert str(store) == "s3://bdn/store"
    secret = Secret(
        str(settings.store_secret), environment[f"BDN_INFRASTRUCTURE_SECRET_{str(settings.store_secret).upper()}"]
    )
    keys = json.loads(COMPOSE["configs"]["s3"]["content"])["identities"][0]["credentials"][0]
    found = s3_credentials(secret)
    assert (found.access_key_id, found.secret_access_key) == (keys["accessKey"], keys["secretKey"])


def test_both_planes_of_all_replicas_have_one_address() -> None:
    proxy = COMPOSE["configs"]["caddy"]["content"]
    for port in PORTS:
        assert f":{port} {{" in proxy
        assert "reverse_proxy " + " ".join(f"{replica}:{port}" for replica in REPLICAS) + " {" in proxy
    assert "$" not in proxy  # compose would put a variable of the shell there


@pytest.mark.parametrize("name", AGENTS)
def test_the_agents_find_the_mirror_and_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On loopback, which is the default, each would take itself for the other."""
    environment = in_the_environment_of(name, monkeypatch)
    settings = load_settings()

    assert (settings.node, settings.cache_bytes) == (name, 20_000_000_000)
    assert environment["BDN_URL"] == f"http://mirror:{OURS['mirror-a']['environment']['BDN_PORT']}"
    assert settings.advertise == f"http://{name}:{settings.data_port}"
    assert (settings.host, settings.auth) == ("0.0.0.0", "token")
    assert len({OURS[agent]["environment"]["BDN_AGENT_CLUSTER"] for agent in AGENTS}) == 1


def test_the_published_ports_are_those_that_the_services_listen_on() -> None:
    environment = OURS["mirror-a"]["environment"]
    exposed = re.findall(r"^EXPOSE (.+)$", DOCKERFILE, re.MULTILINE)[0].split()

    assert [port.split(":")[-1] for port in SERVICES["mirror"]["ports"]] == PORTS
    assert [environment["BDN_PORT"], environment["BDN_DATA_PORT"]] == PORTS
    assert exposed == [*PORTS, str(AgentSettings.model_fields["data_port"].default)]
    assert all(port.startswith("127.0.0.1:") for service in SERVICES.values() for port in service.get("ports", []))


def test_the_image_builds_from_the_lock_file_and_from_files_that_exist() -> None:
    copied = [shlex.split(line)[:-1] for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE)]

    assert "--require-hashes -r requirements/runtime.txt" in DOCKERFILE
    assert [source for sources in copied for source in sources if not (ROOT / source).exists()] == []
