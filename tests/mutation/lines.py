"""A plugin of pytest (``-p tests.mutation.lines``) that notes which lines of one file each test runs, and how long the test takes.

``BDN_MUTATED`` names the file, ``BDN_LINES`` where to write, and ``BDN_LINES_SECONDS`` after how long no other test is begun. Programs
that tests start are not looked into.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

_FILE: Final = str(Path(os.environ["BDN_MUTATED"]).resolve())
_OUT: Final = Path(os.environ["BDN_LINES"])  # now: tests see nothing of BDN's variables
_UNTIL: Final = time.monotonic() + float(os.environ["BDN_LINES_SECONDS"])
_seen: set[int] = set()
_found: dict[str, tuple[float, list[int]]] = {}
_failed: set[str] = set()


def _see(frame: FrameType, event: str, _: Any) -> Any:
    return _see_line if frame.f_code.co_filename == _FILE else None


def _see_line(frame: FrameType, event: str, _: Any) -> Any:
    _seen.add(frame.f_lineno)
    return _see_line


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: object) -> Iterator[None]:
    """Fixtures are part of the test that asks for them first."""
    _seen.clear()
    began = time.monotonic()
    threading.settrace(_see)
    sys.settrace(_see)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        if item.nodeid not in _failed:
            _found[item.nodeid] = (time.monotonic() - began, sorted(_seen))
        if time.monotonic() > _UNTIL:
            item.session.shouldstop = "the time for looking is over"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test that fails or is skipped anyway notices nothing."""
    if not report.passed:
        _failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    """What was seen, for whoever started this."""
    _OUT.write_text(json.dumps(_found))
