"""Which paths of a listing may become files, and which trees may exist at all."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

SEGMENT_LIMIT: Final = 255  # bytes; NAME_MAX of every Linux file system we know
PATH_LIMIT: Final = 3072  # bytes; PATH_MAX is 4096, and views add their own prefix
_SEGMENT: Final = r"[^/\\\0.][^/\\\0]*"  # which begins with no dot, so that it is neither "." nor ".."
_PLAIN: Final = re.compile(f"{_SEGMENT}(?:/{_SEGMENT})*")  # most paths are, and of a million each microsecond counts


class UnsafePathError(ValueError):
    """A listed path that must not become a file. Sources map it to INVALID_SOURCE with their own name."""


def normalise_path(path: str) -> str:
    """The path as a manifest holds it: relative, ``/`` between segments, no empty or ``.`` segment.

    Raises:
        UnsafePathError: absolute, empty, with ``..``, NUL, a backslash or a lone surrogate, or too long for a file system.
    """
    if len(path) <= SEGMENT_LIMIT and path.isascii() and _PLAIN.fullmatch(path):
        return path
    shown = ascii(path if len(path) <= 200 else f"{path[:200]}…")
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        msg = f"path {shown} is not valid Unicode"
        raise UnsafePathError(msg) from None
    if path.startswith("/"):
        msg = f"path {shown} is absolute"
        raise UnsafePathError(msg)
    if b"\0" in encoded or b"\\" in encoded:
        msg = f"path {shown} holds a NUL or a backslash"
        raise UnsafePathError(msg)
    segments = [segment for segment in path.split("/") if segment not in ("", ".")]
    if not segments or path.endswith("/"):
        msg = f"path {shown} names no file"
        raise UnsafePathError(msg)
    if ".." in segments:
        msg = f"path {shown} leaves its folder with '..'"
        raise UnsafePathError(msg)
    normal = "/".join(segments)
    if len(normal.encode()) > PATH_LIMIT or any(len(segment.encode()) > SEGMENT_LIMIT for segment in segments):
        msg = f"path {shown} is too long for a file system"
        raise UnsafePathError(msg)
    return normal


def check_tree(paths: Iterable[str]) -> None:
    """Refuse normalised paths that cannot all be files of one tree.

    Raises:
        UnsafePathError: one path twice, or one path that is both a file and a folder.
    """
    files: set[str] = set()
    for path in paths:
        if path in files:
            msg = f"path {path!a} stands twice in the listing"
            raise UnsafePathError(msg)
        files.add(path)
    folders: set[str] = set()
    for path in files:
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            if folder in files:
                msg = f"path {folder!a} is both a file and a folder"
                raise UnsafePathError(msg)
            folders.add(folder)
            folder = folder.rpartition("/")[0]
