"""A manifest as a directory: built aside, complete before anybody sees it."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from bdn.core.manifest import FileEntry, Manifest
from bdn.disk.durable import disk_errors
from bdn.wire.stage_schema import ViewKind
from node_agent.stage.view.placing import Placer, Slot

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Built:
    """How a view was made, and why it is not all hard links where it is not."""

    kind: ViewKind
    reason: str | None


def build_view(manifest: Manifest, root: Path, files: Path, stop: threading.Event) -> Built:
    """Make the directory ``root``, which is absent, with every file of the manifest. Blocking.

    Folders are 0755 and files 0444, whatever the umask. Everything is done relative to open folders: paths as long as a
    manifest allows work below a prefix of any length, and nobody can slip a link in between. About 10 µs per linked file.

    Raises:
        DiskFailedError: the caller removes what is there.
        CanceledError: ``stop`` was set; likewise.
    """
    folders: defaultdict[str, list[FileEntry]] = defaultdict(list)
    for entry in manifest.files:
        folders[entry.path.rpartition("/")[0]].append(entry)
    with disk_errors(root):
        source = os.open(files, _FOLDER)
        try:
            placer = Placer(source, stop)
            root.mkdir()
            top = os.open(root, _FOLDER)
            try:
                os.fchmod(top, 0o755)
                for folder, entries in folders.items():
                    _place_all(placer, top, folder, entries)
            finally:
                os.close(top)
        finally:
            os.close(source)
    return Built(placer.kind, placer.reason)


def _place_all(placer: Placer, top: int, folder: str, entries: list[FileEntry]) -> None:
    descriptor = _open_below(top, folder)
    try:
        for entry in entries:
            placer.place(entry.digest, Slot(descriptor, entry.path.rpartition("/")[2].encode()))
    finally:
        os.close(descriptor)


def _open_below(top: int, folder: str) -> int:
    """Open a folder, making it and those above it as needed."""
    descriptor = os.dup(top)
    for segment in folder.encode().split(b"/") if folder else ():
        above = descriptor
        try:
            try:
                descriptor = os.open(segment, _FOLDER, dir_fd=above)
            except FileNotFoundError:
                os.mkdir(segment, dir_fd=above)
                descriptor = os.open(segment, _FOLDER, dir_fd=above)
                os.fchmod(descriptor, 0o755)
        finally:
            os.close(above)
    return descriptor
