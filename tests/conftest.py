"""What holds for all tests."""

import gc
import signal

import pytest

from tests.support.promises import (  # noqa: F401 - hooks and fixtures
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_terminal_summary,
    scale,
    tally,
)

# A shell starts what runs in its background with Ctrl-C ignored, and so would be the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart() -> None:
    """Eight thousand tests are made, and none of them is in a cycle: the collector need not look at them as they are made."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Nor at any time afterwards."""
    gc.freeze()
    gc.enable()
