"""Pulls, with as few services as each needs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from bdn.local.pulled import Pull, Pulled, Say, check_held, standing_result
from bdn.sources.environment import forbids_hub

if TYPE_CHECKING:
    from bdn.local.pull_plan import PlannedPull
    from bdn.settings import ClientSettings
    from bdn.wire.progress import Report


async def pull_files(pull: Pull, settings: ClientSettings, say: Say, report: Report | None) -> Pulled:
    """Put the files at the directory, verified. Canceled, it leaves no directory that it did not find.

    Raises ``InvalidRequestError``, ``NotFoundError``, ``NoRoomError``, and errors of the mirror, the cache and the disk.
    """
    pull = _checked(pull, settings, say)
    if (standing := await asyncio.to_thread(standing_result, pull, settings.data_dir, say)) is not None:
        return standing
    from bdn.local.pulling import carried_out  # noqa: PLC0415 - mirror and agent: 1.5 s

    return await carried_out(pull, settings, say, report)


async def plan_files(pull: Pull, settings: ClientSettings, say: Say) -> PlannedPull:
    """What ``pull_files`` would do. Changes nothing."""
    from bdn.local.pulling import planned  # noqa: PLC0415 - as above

    return await planned(_checked(pull, settings, say), settings, say)


def _checked(pull: Pull, settings: ClientSettings, say: Say) -> Pull:
    """Without requests to the hub where the environment forbids them. Raises ``NotFoundError`` if nothing is held."""
    if not pull.offline and pull.wanted.source.scheme == "hf" and (forbidden := forbids_hub()):
        say(f"{forbidden}: no requests to the hub, as with --offline")
        pull = replace(pull, offline=True)
    if pull.offline:
        check_held(pull.wanted, settings.data_dir)
    return pull
