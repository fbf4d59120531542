"""The command ``bdn-admin``."""

import click

import bdn
from bdn.cli.main import LazyGroup


@click.group(
    cls=LazyGroup,
    commands_at={
        "agents": (
            "bdn.cli.ls:agents",
            "List agents with capacity and last heartbeat; remove retired agents.",
        ),
        "cache": ("bdn.cli.cache:cache", "List, measure and trim the training caches of projects."),
        "evict": ("bdn.cli.operations:evict", "Evict manifests from caches and from the mirror's store."),
        "gc": ("bdn.cli.operations:gc", "Delete unreferenced chunks from the mirror's store."),
        "ls": ("bdn.cli.ls:ls", "List manifests and where they are cached."),
        "prefetch": ("bdn.cli.operations:prefetch", "Fill node caches from the mirror before a job needs the files."),
        "projects": ("bdn.cli.projects:projects", "List projects, and delete them with their checkpoints."),
        "restore": ("bdn.cli.operations:restore", "Restore evicted manifests on the mirror, without a transfer."),
        "secrets": ("bdn.cli.secrets:secrets", "Store secrets for sources in the mirror's database, encrypted."),
        "store": ("bdn.cli.store:store", "Copy the mirror's store, or change the database that owns it."),
        "teams": ("bdn.cli.projects:teams", "Create and list the teams of an organisation."),
        "tokens": ("bdn.cli.tokens:tokens", "Create and revoke tokens."),
        "verify": ("bdn.cli.operations:verify", "Verify stored chunks and cached files, and repair corrupt ones."),
        "why": ("bdn.cli.why:why", "Explain where a source, manifest or file is cached, and why."),
    },
)
@click.version_option(bdn.__version__, prog_name="bdn-admin")
def main() -> None:
    """Inspect and manage the mirror and the caches of its nodes.

    BDN_URL and BDN_TOKEN name the mirror; an operator acts for the organisation in BDN_ORGANISATION. Without BDN_URL and without a
    running service, the commands use the data directory of 'bdn pull' on this machine.
    """
