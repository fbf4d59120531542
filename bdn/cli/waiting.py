"""What a command that waits says while the service does not answer."""

from __future__ import annotations

from bdn.cli.output import Output
from bdn.core.errors import BdnError
from bdn.net.client.service_client import OUTAGE_SECONDS, OutageRetry


def waiting_for(output: Output, what: str) -> OutageRetry:
    """Goes on asking about ``what``, such as a mirror's id, and says so once."""

    def told(error: BdnError | None) -> None:
        if error is None:
            output.say(f"{what}: there is an answer again")
        else:
            output.warn(f"{error}. {what} may go on meanwhile; this asks again for {OUTAGE_SECONDS / 60:.0f} minutes")

    return OutageRetry(told=told)
