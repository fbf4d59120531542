"""``bdn-rank`` in the foreground: settings, log, and the message that Kubernetes shows of a container that failed."""

import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from bdn.cli.logs import log_to_stderr
from bdn.cli.output import DONE, USAGE, Output, exit_code_of, say_wrong_settings
from bdn.core.errors import BdnError
from bdn.net.host_lookups import run_program
from bdn.settings import SettingsError, warn_of_service_links
from node_agent.run.pod import PodSettings, follow, prepare

_WORK: Final[dict[str, Callable[[PodSettings, Path], Coroutine[Any, Any, None]]]] = {
    "prepare": prepare,
    "follow": follow,
}
_MESSAGE: Final = "dev/termination-log"  # the default of Kubernetes' terminationMessagePath


def run(command: str, root: Path) -> int:
    """Returns the exit code."""
    try:
        settings = PodSettings()  # type: ignore[call-arg]  # from the environment
    except SettingsError as error:
        say_wrong_settings(error)
        return USAGE
    log_to_stderr(settings.log)
    warn_of_service_links()
    try:
        run_program(_WORK[command](settings, root))
    except BdnError as error:
        Output.error(error)
        _leave_message(root / _MESSAGE, f"{error.message} [{error.code}]")
        return exit_code_of(error)
    return DONE


def _leave_message(path: Path, text: str) -> None:
    with suppress(OSError), os.fdopen(os.open(path, os.O_WRONLY | os.O_TRUNC), "w") as file:
        file.write(text)
