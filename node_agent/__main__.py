"""Options of ``bdn-node-agent``. The daemon is imported when it runs, so that ``--help`` does not wait for it."""

import sys

import click

from bdn import __version__

_EPILOG = """\b
Example:
  BDN_URL=http://mirror:8460 BDN_AGENT_CACHE_DIR=/nvme/bdn BDN_AGENT_CACHE_BYTES=2TB bdn-node-agent
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG)
@click.option(
    "--roles",
    help="What this agent is, comma-separated: node, cluster, job (default: BDN_AGENT_ROLES, or node,cluster).",
)
@click.version_option(__version__)
def main(roles: str | None) -> None:
    """Keep mirrored files on this node's disk and stage them for its jobs.

    Everything is set by environment variables with the prefix BDN_AGENT_, or by the table [agent] of the TOML file that
    BDN_CONFIG names. The control API listens on the unix socket BDN_AGENT_SOCKET, and on the loopback port BDN_AGENT_PORT
    if that is set.
    """
    from node_agent.daemon import run  # noqa: PLC0415 - a fifth of a second

    sys.exit(run(roles))


if __name__ == "__main__":
    main()
