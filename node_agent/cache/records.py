"""Held manifests on disk: the manifest, the layout beside it, and when it was used last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from bdn.core.digest import Digest, digest_of
from bdn.core.errors import InternalError
from bdn.core.layout import FileLayout
from bdn.core.manifest import Manifest
from bdn.wire.mirror_schema import LayoutBody
from node_agent.disk.durable import disk_errors, write_durably
from node_agent.disk.places import Places


@dataclass(frozen=True)
class Held:
    """A manifest with its layout. The layout is None where nobody needs it: for what is whole on this disk already."""

    manifest: Manifest
    layout: LayoutBody | None

    def file_layouts(self, wanted: frozenset[Digest]) -> dict[Digest, FileLayout]:
        """The layouts of these contents, as far as the manifest names them; each is checked against the file's name.

        Raises:
            InternalError: the layout lacks one, or has one that is wrong.
        """
        here = {digest: size for digest, size in self.manifest.contents.items() if digest in wanted}
        try:
            found = {Digest.parse(file.digest): file for file in self.layout.files} if self.layout else {}
            layouts = {digest: found[digest].to_core() for digest in here}
        except (KeyError, ValueError) as error:
            raise InternalError(f"the layout of manifest {self.manifest.digest} is wrong: {error}") from error
        if wrong := [digest for digest, layout in layouts.items() if layout.size != here[digest]]:
            raise InternalError(f"manifest {self.manifest.digest} and its layout disagree about {wrong[0]}")
        return layouts


class ManifestRecords:
    """Reads and writes the folder ``manifests``. Blocking.

    The manifest itself is the commit point, both ways: content without it is rubbish that the next start removes.
    """

    def __init__(self, places: Places) -> None:
        self._places = places

    def save(self, held: Held, now: float) -> None:
        """Make a manifest and its layout durable, used at ``now``."""
        digest = held.manifest.digest
        path = self._places.manifest(digest)
        with disk_errors(path):
            if held.layout:
                write_durably(self._places.layout(digest), held.layout.to_json().encode())
            if not path.exists():
                write_durably(path, held.manifest.canonical)
        self.touch(digest, now)

    def touch(self, digest: Digest, now: float) -> None:
        """The manifest was used at ``now``; this is what keeps LRU order across restarts."""
        path = self._places.manifest(digest)
        with disk_errors(path):
            os.utime(path, ns=(int(now * 1e9), int(now * 1e9)))

    def last_used(self, digest: Digest) -> float:
        """What ``touch`` said last."""
        return self._places.manifest(digest).stat().st_mtime

    def load(self, digest: Digest) -> Manifest | None:
        """The manifest; None when it is absent or is not what its name says."""
        path = self._places.manifest(digest)
        with disk_errors(path):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                return None
        return Manifest.parse(content) if digest_of(content) == digest else None

    def load_layout(self, digest: Digest) -> LayoutBody | None:
        """The layout; None when it is absent or malformed. Its files are checked when they are used."""
        try:
            return LayoutBody.model_validate_json(self._places.layout(digest).read_bytes())
        except (OSError, ValueError):
            return None

    def forget(self, digest: Digest) -> None:
        """Remove the manifest first, then its layout."""
        with disk_errors(self._places.manifest(digest)):
            self._places.manifest(digest).unlink(missing_ok=True)
            self._places.layout(digest).unlink(missing_ok=True)

    def digests(self) -> Iterator[Digest]:
        """The names of all manifests here."""
        for path in self._places.manifests.iterdir():
            name, _, kind = path.name.partition(".")
            if kind == "json":
                yield Digest(name)
