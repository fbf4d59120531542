"""A view in the cache of the hub's client: ``<repository>/snapshots/<commit>``, for pulls and stages.

The repository's folder belongs to the user and the hub's client. A view only adds to it: blobs named by ETag, and
relative links to them. The listing ``trees/<commit>.json``, written before, names the ETags; with it, the client
detects a view that a killed pull left unfinished, and a selection.
"""

import json
import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from bdn.core.chunk import FileEntry
from bdn.core.errors import InvalidRequestError
from bdn.core.layout import Manifest
from bdn.disk.durable import open_folder, remove_tree, sync_folder, sync_folders
from node_agent.disk.whole_files import ChangedFilesError, WholeFiles
from node_agent.stage.view.build import Built, Placer, can_clone, looks_ours, open_below
from node_agent.stage.view.destination import Earlier, check_place, errors_at, nearest_folder

_ETAG: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class HubSnapshot:
    """One commit of one repository. Blocking. Blobs are hard links to the cache where possible.

    Never removes another program's files. Replaces a blob that differs from the cache's file in size or times.
    """

    path: Path
    stage_id: str
    files: WholeFiles
    is_in_place = True  # recorded once its files are in place

    @property
    def repository(self) -> Path:
        return self.path.parents[1]

    @property
    def _blobs(self) -> Path:
        return self.repository / "blobs"

    @property
    def _aside(self) -> Path:
        return self.repository / f".bdn-{self.stage_id}"

    def nearest(self) -> Path:
        return nearest_folder(self.path.parent)

    def makes_copies(self) -> bool:
        """Whether blobs will need space of their own. Tries to clone an empty file."""
        with errors_at(self.path):
            there, cache = self.nearest(), self.files.places.root
            return there.stat().st_dev != cache.stat().st_dev and not can_clone(cache, there)

    def inode(self) -> int | None:
        try:
            return self.path.stat().st_ino if self.path.is_dir() else None
        except OSError:
            return None

    def check(self, _: Earlier | None) -> None:
        """Raises ``InvalidRequestError`` if no view could be built there."""
        with errors_at(self.path):
            check_place(self.path, self.nearest, self.files.places)

    def is_intact(self, earlier: Earlier) -> bool:
        if earlier.manifest is None or self.inode() != earlier.inode:
            return False
        return self.shows(earlier.manifest)

    def shows(self, manifest: Manifest) -> bool:
        """Whether all files of the manifest are there, unchanged."""
        return all(map(self._shows, manifest.files))

    def blobs(self, manifest: Manifest) -> dict[str, FileEntry]:
        """The files of the manifest by ETag. Raises ``InvalidRequestError`` if the listing lacks one."""
        return {self._etags[entry.path]: entry for entry in self._checked(manifest)}

    def _shows(self, entry: FileEntry) -> bool:
        try:
            target = str((self.path / entry.path).readlink())
            etag = target.rpartition("/")[2]
            return target == _target(entry.path, etag) and self._has(entry, etag)
        except OSError:
            return False

    def _has(self, entry: FileEntry, etag: str) -> bool:
        blob = self._blobs / etag
        try:
            return looks_ours(entry, blob.lstat(), self.files, os.fsencode(blob), None)
        except FileNotFoundError:
            return False

    def claimed(self) -> AbstractContextManager[None]:
        """Pulls at the same snapshot need no lock: each change is atomic and adds the same."""
        return nullcontext()

    def build(self, manifest: Manifest, _: Earlier | None, stop: threading.Event) -> tuple[Built, None]:
        """Build missing blobs aside. The snapshot has no inode yet.

        Raises ``InvalidRequestError``, ``DiskFailedError``, ``CanceledError``, ``ChangedFilesError``.
        """
        with errors_at(self.path):
            self.clear()
            self._blobs.mkdir(parents=True, exist_ok=True)
            self._aside.mkdir(mode=0o700)
            blobs = self.blobs(manifest)
            placer = Placer(self.files, stop, links=True, stamp=None)
            with open_folder(self._aside) as aside:
                for etag, entry in blobs.items():
                    if not self._has(entry, etag):
                        placer.place(FileEntry(etag, entry.size, entry.digest), aside)
            if placer.changed:
                raise ChangedFilesError(dict.fromkeys(placer.changed))
            self.files.save(manifest)  # before the user can reach the files
            return Built(placer.kind, placer.reason), None

    def publish(self, manifest: Manifest, _: Earlier | None) -> None:
        """Move the blobs in, then add the links. A failure leaves whole files, which the next pull finds."""
        with errors_at(self.path):
            contents = {self._etags[entry.path]: entry.digest for entry in manifest.files}
            for blob in list(self._aside.iterdir()):
                self.files.move(contents[blob.name], blob, self._blobs / blob.name)
            self.files.save(manifest)
            sync_folder(self._blobs)
            folders: defaultdict[str, list[str]] = defaultdict(list)
            for entry in manifest.files:
                folders[entry.path.rpartition("/")[0]].append(entry.path)
            self.path.mkdir(parents=True, exist_ok=True)
            with open_folder(self.path) as top:
                for folder, paths in folders.items():
                    descriptor = open_below(top, folder)
                    try:
                        for path in paths:
                            self._link(path, descriptor)
                    finally:
                        os.close(descriptor)
            sync_folders(self.path)
            sync_folder(self.path.parent)

    def _link(self, path: str, folder: int) -> None:
        name, target = path.rpartition("/")[2], _target(path, self._etags[path])
        try:
            os.symlink(target, name, dir_fd=folder)
        except FileExistsError:
            with suppress(OSError):  # not a link
                if os.readlink(name, dir_fd=folder) == target:
                    return
            aside = self._aside / "link"
            aside.symlink_to(target)
            os.rename(aside, name, dst_dir_fd=folder)

    def settle(self) -> None:
        pass

    def clear(self) -> None:
        with errors_at(self.path):
            remove_tree(self._aside)

    @cached_property
    def _etags(self) -> Mapping[str, str]:
        """By path, of the whole commit. Raises ``InvalidRequestError``."""
        place = self.repository / "trees" / f"{self.path.name}.json"
        try:
            listed = json.loads(place.read_bytes())["files"]
            etags = {path: entry.get("lfs_sha256") or entry["blob_id"] for path, entry in listed.items()}
        except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise InvalidRequestError(f"cannot read the listing {place}: {error!r}; request it again") from error
        return {path: etag for path, etag in etags.items() if isinstance(etag, str) and _ETAG.fullmatch(etag)}

    def _checked(self, manifest: Manifest) -> Iterator[FileEntry]:
        for entry in manifest.files:
            if entry.path not in self._etags:
                raise InvalidRequestError(
                    f"{self.repository}/trees/{self.path.name}.json lacks {entry.path!r}; request it again"
                )
            yield entry


def _target(path: str, etag: str) -> str:
    """The link of a file of the snapshot, relative to its folder."""
    return f"{'../' * (path.count('/') + 2)}blobs/{etag}"
