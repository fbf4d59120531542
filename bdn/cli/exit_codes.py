"""How a command ends, as docs/contract.md says."""

from __future__ import annotations

from typing import Final

from bdn.core.errors import BdnError

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
IN_USE: Final = 3
NOT_FOUND: Final = 4
INTERRUPTED: Final = 130

_BY_CODE: Final = {
    "IN_USE": IN_USE,
    "NOT_FOUND": NOT_FOUND,
    "SOURCE_NOT_FOUND": NOT_FOUND,
    "REVISION_NOT_FOUND": NOT_FOUND,
    "SECRET_NOT_FOUND": NOT_FOUND,
    "INVALID_REQUEST": USAGE,
    "INVALID_SOURCE": USAGE,
    "INVALID_MOUNT": USAGE,
}


def exit_code_of(error: BdnError) -> int:
    """By the error's code, so that errors reported by a service count like our own."""
    return _BY_CODE.get(error.code, FAILED)
