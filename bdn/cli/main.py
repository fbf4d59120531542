"""The command ``bdn``."""

from __future__ import annotations

import click

import bdn
from bdn.cli.lazy import LazyGroup


@click.group(
    cls=LazyGroup,
    commands_at={
        "pull": ("bdn.cli.pull:pull", "Put the files of a source at DEST, through mirror and cache on this machine."),
        "demo": ("bdn.cli.demo:demo", "Show the main job on real bytes, without a network."),
        "up": ("bdn.cli.up:up", "Run a mirror and an agent on this machine."),
        "serve": ("bdn.cli.mirror_services:serve", "Run the mirror: its API, a worker and the data plane."),
        "worker": ("bdn.cli.mirror_services:worker", "Run one more worker beside a mirror on PostgreSQL."),
        "migrate": ("bdn.cli.mirror_services:migrate", "Bring the database to the schema of this version."),
        "mirror": ("bdn.cli.mirror:mirror", "Mirror sources, and print the mirror's id for 'bdn stage'."),
        "stage": ("bdn.cli.stage:stage", "Stage the files of a READY mirror on this node, and print where they are."),
        "unstage": ("bdn.cli.stage:unstage", "Take a job's files away; the cache keeps them."),
    },
)
@click.version_option(bdn.__version__, prog_name="bdn")
def main() -> None:
    """Put model weights and datasets on this machine, or on a cluster's nodes, before a job's first command runs.

    \b
    bdn pull hf://org/model ./model     the whole path on this machine
    bdn demo                            see it work, without a network
    """
