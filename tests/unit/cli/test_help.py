"""What ``--help`` says."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from bdn.cli.admin import main as admin
from bdn.cli.main import LazyGroup
from bdn.cli.main import main as bdn
from node_agent.__main__ import main as agent
from node_agent.csi.__main__ import main as csi
from node_agent.run.__main__ import main as rank

OF_PODS = [("bdn-rank prepare", rank.commands["prepare"]), ("bdn-rank follow", rank.commands["follow"])]


def commands() -> list[tuple[str, click.Command]]:
    found: list[tuple[str, click.Command]] = [("bdn-node-agent", agent), ("bdn-csi", csi), *OF_PODS]
    for program, group in (("bdn", bdn), ("bdn-admin", admin)):
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            inside = command.commands.items() if isinstance(command, click.Group) else [(None, command)]
            found += [(f"{program} {name} {below}" if below else f"{program} {name}", one) for below, one in inside]
    return found


@pytest.mark.parametrize(("name", "command"), commands(), ids=[name for name, _ in commands()])
def test_every_command_has_help_with_an_example_and_can_print_one_document(name: str, command: click.Command) -> None:
    shown = CliRunner().invoke(command, ["--help"])

    assert (shown.exit_code, "Example" in shown.output, name.rsplit(maxsplit=1)[-1] in shown.output) == (0, True, True)
    options = {option for parameter in command.params for option in parameter.opts}
    is_daemon = name in ("bdn-node-agent", "bdn-csi") or name.startswith("bdn-rank ")  # has no result to print
    assert {"--json", "--quiet"} <= options or is_daemon


@pytest.mark.parametrize("program", [bdn, admin], ids=["bdn", "bdn-admin"])
def test_the_list_of_commands_speaks_like_the_commands_themselves(program: click.Group) -> None:
    """The list is written down so that ``--help`` need not import everything; it must not drift."""
    assert isinstance(program, LazyGroup)
    context = click.Context(program)
    for name in program.list_commands(context):
        command = program.get_command(context, name)
        assert command is not None
        assert command.help
        line = " ".join(program.commands_at[name][1].lower().rstrip(".").split()[:3])
        assert " ".join(command.help.lower().split()).startswith(line), (name, line)


@pytest.mark.parametrize("module", ["bdn.cli.main", "bdn.cli.admin", "bdn.cli.mirror", "bdn.cli.stage"])
def test_a_command_that_talks_to_a_service_loads_none(module: str) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert module in loaded
    assert not {"sqlalchemy", "fastapi", "uvicorn", "bdn.mirror.app", "node_agent"} & set(loaded)


@pytest.mark.parametrize("command", ["bdn pull", "bdn-admin", "bdn-node-agent"])
def test_help_loads_no_module_that_only_a_command_at_work_needs(command: str) -> None:
    programs = {"bdn": "bdn.cli.main", "bdn-admin": "bdn.cli.admin", "bdn-node-agent": "node_agent.__main__"}
    script = f"""
import atexit, sys
from {programs[command.split(maxsplit=1)[0]]} import main
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
main()
"""
    arguments = [sys.executable, "-c", script, *command.split()[1:], "--help"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "Usage" in done.stdout
    heavy = {
        "aiohttp",
        "asyncio",
        "cryptography",
        "fastapi",
        "httpx2",
        "huggingface_hub",
        "pydantic",
        "rich",
        "sqlalchemy",
    }
    assert not heavy & set(done.stderr.split())
