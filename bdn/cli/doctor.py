"""``bdn doctor``: a report of this machine and its services in one screenful."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from bdn.cli.output import DONE, FAILED, Output, command_line

if TYPE_CHECKING:
    from bdn.core.findings import Finding


@click.command()
@click.option("--no-measure", is_flag=True, help="Write and read nothing to measure rates.")
@command_line
async def doctor(output: Output, *, no_measure: bool) -> int:
    """Examine this machine and its services, with a remedy for each problem.

    Examines the settings, the directories that they name, kernel, memory, certificates and environment, and what mirror and
    agent do now. Measures the disk of the cache with a file of at most 256 MiB without a name, and reads at most 64 MiB from
    the mirror. Changes nothing else, and needs no service. Exit code 1 if there is a problem.

    \b
    Example: bdn doctor
    Example: bdn doctor --json --no-measure
    """
    import logging  # noqa: PLC0415

    from bdn.core.findings import worst  # noqa: PLC0415
    from bdn.local.doctor import examine  # noqa: PLC0415

    for name in ("bdn", "node_agent"):  # the probes log what they find, and each is a finding here
        logging.getLogger(name).addHandler(logging.NullHandler())
    findings = await examine(measure=not no_measure)
    level = worst(findings)
    document = {"level": level, "findings": [asdict(finding) for finding in findings]}
    output.result(document, _lines(findings), _lines([one for one in findings if one.level == "problem"]))
    return FAILED if level == "problem" else DONE


def _lines(findings: list[Finding]) -> list[str]:
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<7}  {finding.check:<{width}}  {finding.message}")
        if finding.advice is not None:
            lines.append(f"{'':<7}  {'':<{width}}  -> {finding.advice}")
    return lines
