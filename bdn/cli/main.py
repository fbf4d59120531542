"""The command ``bdn``. Commands are imported when they run, so that ``--help`` does not import a database driver."""

from importlib import import_module
from typing import Any

import click

import bdn


class LazyGroup(click.Group):
    """A group of commands named as ``module:attribute`` with their line of help, in the order of the help page."""

    def __init__(self, *args: Any, commands_at: dict[str, tuple[str, str]], **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, context_settings={"help_option_names": ["-h", "--help"]}, **kwargs)
        self.commands_at = commands_at

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Adds suggestions without importing the commands, as click's own would."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches  # noqa: PLC0415 - 5 ms, for a typo

            near = get_close_matches(args[0], self.commands_at)
            if not near:
                raise
            raise click.UsageError(f"{error.message} Did you mean {' or '.join(map(repr, near))}?", ctx) from None

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.commands_at)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in self.commands_at:
            return None
        module, _, attribute = self.commands_at[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands from their table, without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.commands_at.items()])


@click.group(
    cls=LazyGroup,
    commands_at={
        "pull": ("bdn.cli.pull:pull", "Download SOURCE to DEST, verified and cached."),
        "up": ("bdn.cli.serve:up", "Run a mirror and an agent on this machine."),
        "serve": ("bdn.cli.serve:serve", "Run the mirror: its API, a worker and the data plane."),
        "worker": ("bdn.cli.serve:worker", "Run an additional worker for a mirror on PostgreSQL."),
        "migrate": ("bdn.cli.serve:migrate", "Migrate the database to this version's schema."),
        "mirror": ("bdn.cli.mirror:mirror", "Mirror sources, and print the mirror's id for 'bdn stage'."),
        "stage": ("bdn.cli.stage:stage", "Mount the files of a READY mirror for a job, and print the paths."),
        "ls": ("bdn.cli.ls:ls", "List manifests and where they are cached."),
        "doctor": ("bdn.cli.doctor:doctor", "Examine this machine and its services, with a remedy for each problem."),
        "unstage": ("bdn.cli.stage:unstage", "Unmount and remove the files of a stage."),
        "sync": ("bdn.cli.sync:sync", "Upload a job's checkpoints as they are written."),
        "checkpoints": ("bdn.cli.checkpoints:checkpoints", "List, download and delete the checkpoints of jobs."),
        "volumes": (
            "bdn.cli.volumes:volumes",
            "Create, list and remove writable job directories (scratch, checkpoints, caches).",
        ),
        "jobs": ("bdn.cli.jobs:jobs", "List and stop training jobs, and print their logs."),
        "truss": ("bdn.cli.truss:truss", "Run truss, the client of Baseten, against the mirror."),
    },
)
@click.version_option(bdn.__version__, prog_name="bdn")
def main() -> None:
    """Put model weights and datasets on this machine or on a cluster's nodes, before a job's first command runs.

    \b
    bdn pull hf://org/model ./model     download a model, verified and cached
    """
