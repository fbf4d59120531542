"""``python -m bdn.slurm``: what the scripts in deploy/slurm run, as root, with the environment of slurmd's hooks."""

import logging
import os
import sys
from logging.handlers import SysLogHandler
from pathlib import Path
from typing import Final

import click

from bdn.cli.logs import RemarkFormatter
from bdn.client.services import open_services
from bdn.net.host_lookups import run_program
from bdn.settings import ClientSettings, SettingsError
from bdn.slurm.hooks import Hooks, Outages, is_over
from bdn.slurm.job_folder import JobFolders, SlurmJob

logger = logging.getLogger("bdn.slurm")
_SYSLOG: Final = Path("/dev/log")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("hook", type=click.Choice(("prolog", "epilog")))
@click.option("--jobs", required=True, type=click.Path(path_type=Path), help="The folder that task_prolog reads.")
@click.option(
    "--seconds",
    type=click.IntRange(1),
    default=3000,
    show_default=True,
    help="How long a job waits for its files; less than PrologEpilogTimeout.",
)
@click.option(
    "--secret", "secrets", multiple=True, metavar="NAME", help="A secret that comments may name; may be repeated."
)
def main(hook: str, jobs: Path, seconds: int, secrets: tuple[str, ...]) -> None:
    """Stage the sources of a job's comment on this node, or release them.

    \b
    Example: SLURM_JOB_ID=7 SLURM_JOB_UID=1000 SLURM_JOB_GID=1000 SLURM_JOB_COMMENT=bdn:hf://org/model
             python -m bdn.slurm prolog --jobs /run/bdn-slurm
    """
    _log()
    try:
        job = SlurmJob.of(os.environ)
    except (KeyError, ValueError) as error:
        raise click.UsageError(f"slurmd starts this command, with the variables of a job: {error}") from None
    try:
        sys.exit(run_program(_run(hook, job, JobFolders(jobs), seconds, frozenset(secrets))))
    except (OSError, SettingsError) as error:
        logger.error("job %s: %s failed on this node: %s", job.id, hook, error)  # noqa: TRY400 - of the node, not a bug
        sys.exit(1)


async def _run(hook: str, job: SlurmJob, folders: JobFolders, seconds: float, secrets: frozenset[str]) -> int:
    outages = Outages()
    async with open_services(ClientSettings(), outages.retry) as services:
        hooks = Hooks(services, folders, is_over, outages, secrets)
        if hook == "prolog":
            return await hooks.prolog(job, seconds)
        await hooks.epilog(job)
        return 0


def _log() -> None:
    """Syslog, too: slurmd logs what a hook prints only if the hook fails."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if _SYSLOG.exists():
        handlers.append(SysLogHandler(str(_SYSLOG)))
        handlers[-1].ident = "bdn-slurm: "  # type: ignore[attr-defined]
    for handler in handlers:
        handler.setFormatter(RemarkFormatter())
        logging.getLogger("bdn").addHandler(handler)


if __name__ == "__main__":
    main()
