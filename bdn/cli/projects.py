"""``bdn-admin projects`` and ``bdn-admin teams``: the owners of pushed checkpoints."""

import click

from bdn.cli.clients import reachable_mirror
from bdn.cli.output import Output, command_line, fields_of, table
from bdn.core.units import counted
from bdn.wire.access_schema import TeamRequest


@click.group()
def projects() -> None:
    """List projects, and delete them with their checkpoints. The first upload of a checkpoint creates its project."""


@projects.command("ls")
@command_line
async def list_projects(output: Output) -> None:
    """List the projects of the organisation, or of the token's team, oldest first.

    \b
    Example: bdn-admin projects ls --json
    """
    async with reachable_mirror(output) as client:
        found = await client.projects()
    rows = [fields_of(one, "id name team checkpoints size_bytes created_at") for one in found.items]
    output.result(found, table(rows, "no projects"), [one.id for one in found.items])


@projects.command("rm")
@click.argument("project", metavar="PROJECT")
@command_line
async def remove_project(output: Output, *, project: str) -> None:
    """Delete a project, by id or name, and all its checkpoints. This cannot be undone; manifests mirrored from its checkpoints stay.

    Refused (exit 3) while an upload to the project is running, or a job on any node has its training cache mounted. Repeat the command after an interruption.

    \b
    Example: bdn-admin projects rm llama
    """
    async with reachable_mirror(output) as client:
        removed = await client.remove_project(project)
    output.result(
        removed,
        [f"deleted project {removed.name} ({removed.id}) and {counted(removed.checkpoints, 'checkpoint')}"],
        [removed.id],
    )


@click.group()
def teams() -> None:
    """Create and list the teams of an organisation. Every project belongs to a team; without one, to the team Default."""


@teams.command()
@click.argument("name")
@command_line
async def create(output: Output, *, name: str) -> None:
    """Create a team if it does not exist.

    \b
    Example: bdn-admin teams create research
    """
    request = TeamRequest(name=name)
    async with reachable_mirror(output) as client:
        made = await client.make_team(request)
    output.result(made, [f"team {made.name} ({made.id})"], [made.id])


@teams.command("ls")
@command_line
async def list_teams(output: Output) -> None:
    """List the teams of the organisation, oldest first; with a team's token, that team.

    \b
    Example: bdn-admin teams ls
    """
    async with reachable_mirror(output) as client:
        found = await client.teams()
    rows = [fields_of(one, "id name created_at") for one in found.items]
    output.result(found, table(rows, "no teams"), [one.id for one in found.items])
