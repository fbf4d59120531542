"""``bdn-node-agent``: the daemon."""

from __future__ import annotations

import sys

import click

from bdn import __version__
from bdn.cli.output import USAGE, exit_code_of, log_to_stderr
from bdn.core.errors import BdnError
from bdn.net.host_lookups import run_program
from bdn.settings import SettingsError
from node_agent.server import serve
from node_agent.settings import load_settings

_EPILOG = """\b
Example:
  BDN_URL=http://mirror:8460 BDN_AGENT_CACHE_DIR=/nvme/bdn BDN_AGENT_CACHE_BYTES=2TB bdn-node-agent
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG)
@click.option("--roles", help="What this agent is, comma-separated: node, cluster (default: BDN_AGENT_ROLES, or both).")
@click.version_option(__version__)
def main(roles: str | None) -> None:
    """Keep mirrored files on this node's disk and stage them for its jobs.

    Everything is set by environment variables with the prefix BDN_AGENT_, or by the table [agent] of the TOML file that
    BDN_CONFIG names. The control API listens on the unix socket BDN_AGENT_SOCKET, and on the loopback port BDN_AGENT_PORT
    if that is set.
    """
    try:
        settings = load_settings(**({"roles": roles} if roles is not None else {}))
    except SettingsError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(USAGE)
    log_to_stderr()
    try:
        sys.exit(run_program(serve(settings)))
    except BdnError as error:
        click.echo(f"error: {error} [{error.code}]", err=True)
        sys.exit(exit_code_of(error))


if __name__ == "__main__":
    main()
