"""README.md is held against the code: its settings, its commands, and the documents that it leads to."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
import tomllib
from io import BytesIO, TextIOWrapper
from pathlib import Path

import click
import pytest

from bdn.cli.services import ClientSettings
from bdn.mirror.settings import MirrorSettings
from node_agent.settings import AgentSettings

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def settings_in_the_code() -> set[str]:
    names = {f"BDN_{field.upper()}" for field in (*MirrorSettings.model_fields, *ClientSettings.model_fields)}
    names |= {
        str(field.validation_alias or f"BDN_AGENT_{name.upper()}") for name, field in AgentSettings.model_fields.items()
    }
    return names | set(re.findall(r"BDN_\w+", (ROOT / "bdn/sources/settings.py").read_text()))


def commands_in_the_readme() -> list[str]:
    blocks = "".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL)).replace("\\\n", " ")
    parts = re.split(r"[;\n&]|&&", re.sub(r"\s#.*", "", blocks))
    commands = (re.sub(r"^(\s|[A-Z_]+=\S+|export \w+=\$\()*", "", part).strip().rstrip(")") for part in parts)
    return [command for command in commands if command.split(" ")[0] in SCRIPTS]


def test_the_table_of_settings_names_each_of_them_and_no_other() -> None:
    table = README.split("| setting | default | |")[1].split("\n\n")[0]
    documented = {name for row in table.splitlines() for name in re.findall(r"`(BDN_\w+)`", row.split(" | ")[0])}

    assert documented == settings_in_the_code()


@pytest.mark.parametrize("command", commands_in_the_readme())
def test_every_command_exists_and_takes_its_arguments(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"what is asked for")))
    program, *arguments = shlex.split(command)
    module, _, attribute = SCRIPTS[program].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    while isinstance(found, click.Group):
        _, found, arguments = found.resolve_command(click.Context(found), arguments)

    assert isinstance(found, click.Command)
    found.make_context(program, list(arguments))


def test_every_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()

    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    "page", ["README.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_every_link_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())

    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []
