"""Options of ``bdn-rank``. The programs are imported when they run, so that ``--help`` does not wait for them."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from bdn import __version__

_ROOT: Final[Callable[[Callable[..., Any]], Callable[..., Any]]] = click.option(
    "--root",
    default="/",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory below which all other paths are.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Run one rank of a training job in a pod of Kubernetes: what the mirror's containers in the pod do.

    BDN_RUN, JOB_COMPLETION_INDEX, BDN_NODE and BDN_POD_UID name rank and pod, BDN_URL the mirror, and BDN_AGENT_TOKEN_FILE the pod's
    own token.
    """
    # Process 1 of a container ignores signals until it handles them, unless it blocks them: then they wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


@main.command(
    epilog="\b\nExample:\n  BDN_URL=http://mirror:8460 BDN_RUN=k3vm9x2p4q BDN_NODE=n1 BDN_POD_UID=0d2f bdn-rank prepare"
)
@_ROOT
def prepare(root: Path) -> None:
    """Write the rank's files: an init container.

    Waits until the mirror knows the pod, then writes /rank/shared, and unpacks the job's archive into /b10/workspace.
    """
    _run("prepare", root)


@main.command(
    epilog="\b\nExample:\n  BDN_URL=http://mirror:8460 BDN_RUN=k3vm9x2p4q BDN_NODE=n1 BDN_POD_UID=0d2f bdn-rank follow"
)
@_ROOT
def follow(root: Path) -> None:
    """Send the rank's output and checkpoints: a container beside the job's own.

    Lets the commands start once /podinfo/want says go. Ends once the rank's last process has ended and the mirror has everything.
    """
    _run("follow", root)


def _run(command: str, root: Path) -> None:
    from node_agent.run.pod_program import run  # noqa: PLC0415 - half a second

    sys.exit(run(command, root))


if __name__ == "__main__":
    main()
