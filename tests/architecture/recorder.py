"""A program of the product, which notes its calls between two signals: ``python recorder.py OUT ENTRY SCRIPT [ARGUMENT…]``.

It imports nothing of the tests, since it also runs in other checkouts.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

PACKAGES: Final = ("bdn", "node_agent", "migrations")
_IS_FUNCTION: Final = 1  # CO_OPTIMIZED: the body of a function, not of a module or class


class Recorder:
    """Notes in which thousandths of a second functions of each product file ran, and when files got names and were unlinked."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._is_on = False
        self._calls: set[tuple[str, int]] = set()
        self._named: list[tuple[str, int]] = []
        self._unlinked: list[int] = []
        self._watched: dict[CodeType, str | None] = {}

    def start(self) -> None:
        """From now on, in this thread and in those to come."""
        signal.signal(signal.SIGUSR1, self._begin)
        signal.signal(signal.SIGUSR2, self._end)
        sys.addaudithook(self._hear)
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if self._is_on and event == "call":
            code = frame.f_code
            if code not in self._watched:
                self._watched[code] = self._file_of(code)
            if file := self._watched[code]:
                self._calls.add((file, now()))

    @staticmethod
    def _file_of(code: CodeType) -> str | None:
        is_way = code.co_flags & _IS_FUNCTION and not re.fullmatch("__.*__", code.co_name)
        path = Path(code.co_filename)
        return str(path) if is_way and any(package in path.parts for package in PACKAGES) else None

    def _hear(self, event: str, given: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event == "os.remove":
            self._unlinked.append(now())
        elif event == "os.rename" or (event == "open" and given[2] & os.O_CREAT):
            self._named.append((str(given[0]), now()))

    def _begin(self, *_: object) -> None:
        self._calls, self._named, self._unlinked, self._is_on = set(), [], [], True
        self._tell({})

    def _end(self, *_: object) -> None:
        self._is_on = False
        self._tell({"calls": sorted(self._calls), "named": self._named, "unlinked": self._unlinked})

    def _tell(self, document: dict[str, Any]) -> None:
        part = self._out.with_suffix(".part")
        part.write_text(json.dumps(document))
        part.rename(self._out)


def now() -> int:
    """Thousandths of a second, the same in all processes."""
    return time.monotonic_ns() // 1_000_000


def main(out: str, entry: str, script: str, *arguments: str) -> None:
    """Run what stands behind a script of pyproject.toml."""
    sys.path.remove(str(Path(__file__).parent))
    recorder = Recorder(Path(out))
    sys.argv = [script, *arguments]
    module, _, function = entry.partition(":")
    recorder.start()
    program = runpy.run_module(module, alter_sys=False)
    sys.exit(program[function]())


if __name__ == "__main__":
    main(*sys.argv[1:])
