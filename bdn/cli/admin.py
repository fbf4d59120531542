"""The command ``bdn-admin``."""

import click

import bdn
from bdn.cli.main import LazyGroup


@click.group(
    cls=LazyGroup,
    commands_at={
        "agents": (
            "bdn.cli.ls:agents",
            "List the agents, their space and when they were heard of; forget those that are gone.",
        ),
        "cache": ("bdn.cli.cache:cache", "Look into the training caches of projects, and delete what is in them."),
        "evict": ("bdn.cli.operations:evict", "Evict from caches and from the mirror's store."),
        "gc": ("bdn.cli.operations:gc", "Collect what no manifest names out of the mirror's store."),
        "ls": ("bdn.cli.ls:ls", "List what is held where."),
        "prefetch": ("bdn.cli.operations:prefetch", "Fill the caches of nodes with what is READY on the mirror."),
        "projects": ("bdn.cli.projects:projects", "List projects, and delete them with their checkpoints."),
        "restore": ("bdn.cli.operations:restore", "Bring back what was evicted from the mirror, moving no bytes."),
        "secrets": ("bdn.cli.secrets:secrets", "Keep secrets for sources in the mirror's database, encrypted."),
        "store": ("bdn.cli.store:store", "Copy the mirror's store to another place."),
        "teams": ("bdn.cli.projects:teams", "Make and list the teams of an organisation."),
        "tokens": ("bdn.cli.tokens:tokens", "Make and revoke tokens."),
        "verify": ("bdn.cli.operations:verify", "Read again what is held, find wrong bytes, and repair them."),
        "why": ("bdn.cli.why:why", "Explain why something is, or is not, cached."),
    },
)
@click.version_option(bdn.__version__, prog_name="bdn-admin")
def main() -> None:
    """Look into a BDN, bring things to its nodes and take them out of it.

    The mirror is found by BDN_URL and BDN_TOKEN; an operator acts for the organisation in BDN_ORGANISATION. Where BDN_URL is not set and no service runs, the commands work on what
    'bdn pull' has left on this machine.
    """
