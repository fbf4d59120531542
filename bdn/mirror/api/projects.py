"""The routes of teams, of their projects, and of the projects' checkpoints."""

from typing import Annotated

from bdn.mirror.api.callers import CheckpointId, Controller, Name, ProjectName, TeamController
from bdn.mirror.jobs.projects import Projects
from bdn.net.api_server import new_router, provided
from bdn.wire.access_schema import Team, TeamRequest
from bdn.wire.push_schema import Checkpoint, Project
from bdn.wire.shapes import Items

_Projects = Annotated[Projects, provided(Projects)]

projects_router = new_router("projects")


@projects_router.get("/checkpoints", summary="Checkpoints, oldest first")
async def list_checkpoints(
    projects: _Projects, caller: TeamController, project: Name = None, job: Name = None
) -> Items[Checkpoint]:
    return Items[Checkpoint](items=await projects.checkpoints(caller.organisation, caller.team, project, job))


@projects_router.delete("/checkpoints/{checkpoint_id}", summary="Delete a checkpoint for ever")
async def remove_checkpoint(projects: _Projects, checkpoint_id: CheckpointId, caller: TeamController) -> Checkpoint:
    return await projects.remove(checkpoint_id, caller.organisation, caller.team)


@projects_router.get("/projects", summary="Projects, oldest first")
async def list_projects(projects: _Projects, caller: TeamController) -> Items[Project]:
    return Items[Project](items=await projects.projects(caller.organisation, caller.team))


@projects_router.delete("/projects/{project}", summary="Delete a project and its checkpoints for ever; again goes on")
async def remove_project(projects: _Projects, project: ProjectName, caller: TeamController) -> Project:
    return await projects.remove_project(caller.organisation, caller.team, project)


@projects_router.post("/teams", status_code=201, summary="Create a team, unless it exists")
async def make_team(projects: _Projects, body: TeamRequest, caller: Controller) -> Team:
    return await projects.make_team(caller.organisation, body.name)


@projects_router.get("/teams", summary="Teams, oldest first")
async def list_teams(projects: _Projects, caller: TeamController) -> Items[Team]:
    return Items[Team](items=await projects.teams(caller.organisation, caller.team))
