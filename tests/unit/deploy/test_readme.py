"""README.md and docs/ are held against the code: their commands, and the documents that they lead to."""

import importlib
import re
import shlex
import sys
import tomllib
from io import BytesIO, TextIOWrapper
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def commands() -> list[str]:
    """Each command of ours in a block of shell."""
    blocks = "".join("".join(re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)) for page in PAGES)
    parts = re.split(r"[;\n&|]", re.sub(r"\s#.*", "", blocks.replace("\\\n", " ")))
    found = (re.sub(r"^(\s|[A-Z_]+=\S+|export \w+=\$\()*", "", part).strip().rstrip(")") for part in parts)
    return sorted({command for command in found if command.split(" ")[0] in SCRIPTS})


def anchors(page: Path) -> set[str]:
    """Its headings, as GitHub names them in a link."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("command", commands())
def test_every_command_exists_and_takes_its_arguments(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"what is asked for")))
    program, *arguments = shlex.split(command.replace("$SLURM_JOB_UID", "1000"))
    module, _, attribute = SCRIPTS[program].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    while isinstance(found, click.Group) and arguments:  # one group does something of its own without a command
        _, found, arguments = found.resolve_command(click.Context(found), arguments)

    assert isinstance(found, click.Command)
    found.make_context(program, list(arguments))


def module_exists(name: str) -> bool:
    place = ROOT / name.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    links = [link.split("#") for link in re.findall(r"\]\(([^):]+)\)", text)]
    places = [(page.parent / path if path else page, *anchor) for path, *anchor in links]
    files = re.findall(r"`((?:bdn|node_agent|tests|migrations|docs)/[\w/.*-]+)`", text)

    assert [place for place, *_ in places if not place.exists()] == []
    assert [(place, anchor) for place, *rest in places for anchor in rest if anchor not in anchors(place)] == []
    assert [
        name
        for name in re.findall(r"(?:`|^)make (\w+)(?:`| +[#&])", text, re.MULTILINE)
        if f"\n{name}:" not in makefile
    ] == []
    assert [name for name in re.findall(r"`python -m (tests[\w.]+)", text) if not module_exists(name)] == []
    assert [name for name in files if not list(ROOT.glob(name))] == []


def test_the_glossary_leads_to_files_that_exist() -> None:
    rows = re.findall(r"^\|.*\|(.*)\|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    places = {place for cell in rows for place in re.findall(r"`([^`]+)`", cell)}

    assert len(places) > 40
    assert [place for place in sorted(places) if not ((ROOT / "bdn" / place).exists() or (ROOT / place).exists())] == []


def test_the_files_that_architecture_follows_exist() -> None:
    """Below the folder of a program, a file is named from there: ``ingest/survey.py``."""
    text = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py)`|\(([\w/]+\.py)\)", text))
    files = [path for folder in ("bdn", "node_agent") for path in (ROOT / folder).rglob("*.py")]

    assert len(named) > 30
    assert [
        name
        for name in sorted(a or b for a, b in named)
        if not any(f"/{path.relative_to(ROOT)}".endswith(f"/{name}") for path in files)
    ] == []


def test_what_code_cites_is_in_the_repository() -> None:
    cited: set[str] = set()
    for file in [*ROOT.glob("bdn/**/*.py"), *ROOT.glob("node_agent/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        text = file.read_text()
        cited |= {f"docs/adr/{number}" for number in re.findall(r"(?:ADR |docs/adr/)([0-9]{4})", text)}
        cited |= set(re.findall(r"docs/[a-z-]+\.md", text))

    assert len(cited) > 5
    assert [name for name in sorted(cited) if not list(ROOT.glob(f"{name}*"))] == []
