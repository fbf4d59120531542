"""What holds for all tests."""

import gc
import signal
from collections.abc import Generator

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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Eight thousand tests are made, and none of them is in a cycle: the collector looks at them neither now nor ever."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
