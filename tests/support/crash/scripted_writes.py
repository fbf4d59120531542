"""Writes at places of a file, noted, and failing or falling short as a test says."""

import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Self

import pytest

from bdn.core.chunk import CHUNK_SIZE

Step = Callable[[int], int]  # of the bytes that are to be written: how many the kernel takes, or an error


@dataclass
class Writes:
    """Each ``pwrite`` as (bytes, offset, whether it was direct). ``steps`` are taken by the direct ones, one each."""

    seen: list[tuple[int, int, bool]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @classmethod
    def noted(cls, monkeypatch: pytest.MonkeyPatch) -> Self:
        writes, real = cls(), os.pwrite

        def pwrite(descriptor: int, content: memoryview, offset: int) -> int:
            is_direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
            writes.seen.append((len(content), offset, is_direct))
            count = writes.steps.pop(0)(len(content)) if is_direct and writes.steps else len(content)
            if is_direct and count % mmap.PAGESIZE:  # the kernel itself would not take so many
                with open(f"/proc/self/fd/{descriptor}", "r+b", buffering=0) as file:  # noqa: PTH123
                    return real(file.fileno(), content[:count], offset)
            return real(descriptor, content[:count], offset)

        monkeypatch.setattr(os, "pwrite", pwrite)
        return writes


def failing(number: int) -> Callable[..., NoReturn]:
    """In place of a step, or of any call: this error."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


def taking(count: int) -> Step:
    """The kernel takes so many bytes and no more."""
    return lambda size: min(count, size)


def aligned(content: bytes) -> memoryview:
    """The content at the beginning of a page, as a byte thread's buffer has it."""
    buffer = memoryview(mmap.mmap(-1, CHUNK_SIZE))[: len(content)]
    buffer[:] = content
    return buffer


def open_descriptors() -> int:
    """How many this process has."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
