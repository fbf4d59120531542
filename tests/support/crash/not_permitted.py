"""Files that may not be touched any more, such as after somebody changed their owner, mode or attributes."""

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def not_permitted(files: set[Path], *, also_moving: bool = False) -> Iterator[None]:
    """To open what stands there now fails with EACCES, also for root; what takes its place may be read.

    With ``also_moving`` nothing can take its place, either: it can be neither renamed nor replaced nor touched.
    """
    inodes = {(path.stat().st_dev, path.stat().st_ino) for path in files}

    def guarded(real: Any) -> Any:
        def opens(path: Any, *given: Any, **named: Any) -> Any:
            place = Path("" if isinstance(path, int) else os.fsdecode(path))
            if place.is_file():
                found = place.stat()
                if (found.st_dev, found.st_ino) in inodes:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *given, **named)

        return opens

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "open", guarded(os.open))
        patched.setattr(io, "open", guarded(io.open))
        if also_moving:
            for name in ("rename", "replace", "utime", "unlink"):
                patched.setattr(os, name, guarded(getattr(os, name)))
        yield
