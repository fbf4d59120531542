"""Options of ``bdn-csi``. The driver is imported when it runs, so that ``--help`` does not wait for it."""

import sys

import click

from bdn import __version__

_EPILOG = """\b
Example:
  BDN_URL=http://mirror:8460 BDN_AGENT_CACHE_DIR=/nvme/bdn BDN_AGENT_SOCKET=/nvme/bdn/agent.sock bdn-csi
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG)
@click.version_option(__version__)
def main() -> None:
    """Mount mirrored files as volumes of Kubernetes' pods: the CSI node driver csi.bdn.dev.

    Listens on two sockets below the kubelet's directory BDN_CSI_KUBELET_DIR, and calls the agent of this node at
    BDN_AGENT_SOCKET and the mirror at BDN_URL. Set BDN_AGENT_EXPOSURE=none for the agent. Needs root and the right to mount.
    """
    from node_agent.csi.program import run  # noqa: PLC0415 - half a second

    sys.exit(run())


if __name__ == "__main__":
    main()
