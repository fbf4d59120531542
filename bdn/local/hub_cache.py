"""The cache of the hub's client, for ``bdn pull --hub-cache`` and ``bdn stage --view hub``.

Below the root, ``models--org--name`` has ``refs/<revision>``, ``snapshots/<commit>``, ``blobs/<etag>`` and
``trees/<commit>.json``. The agent adds blobs and links. Refs and listings, which the mirror knows, are written here: for
pulls by the command, for stages by the agent. Imports no service.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from bdn.core.errors import InvalidRequestError
from bdn.core.source.uri import HuggingFaceUri, SourceUri
from bdn.disk.durable import disk_errors, make_folder, sync_folder

if TYPE_CHECKING:
    from bdn.wire.mirror_schema import HubFile

_MODE: Final = 0o644


def hub_cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """The root that the hub's client uses (huggingface_hub.constants)."""
    home = environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    root = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(root)).expanduser()


@dataclass(frozen=True)
class HubRepository:
    """The folder of one repository. ``uri`` names the requested revision."""

    folder: Path
    uri: HuggingFaceUri

    @classmethod
    def of(cls, uri: SourceUri, root: Path) -> Self:
        """Raises ``InvalidRequestError``: the source is not a repository of a hub."""
        if not isinstance(uri, HuggingFaceUri):
            raise InvalidRequestError(
                f"{uri} is not a repository of a hub, and the hub's cache has only those: name an hf:// source, or leave "
                "out --hub-cache or --view hub"
            )
        if uri.revision is not None and not {"", ".", ".."}.isdisjoint(uri.revision.split("/")):
            raise InvalidRequestError(f"{uri}: no revision has a segment '', '.' or '..'")
        return cls(root / "--".join((f"{uri.kind}s", *uri.repo_id.split("/"))), uri)

    def at(self, commit: str) -> HuggingFaceUri:
        return replace(self.uri, revision=commit)

    def snapshot(self, commit: str | None) -> Path:
        """Where the files of the commit are; of one that is not known yet, the folder above."""
        return self.folder / "snapshots" / commit if commit else self.folder / "snapshots"

    def has_ref(self, commit: str) -> bool:
        """Whether the requested revision names the commit. Raises ``OSError``."""
        return self.uri.commit is not None or (self._ref.is_file() and self._ref.read_bytes() == commit.encode())

    def has_tree(self, commit: str) -> bool:
        return self.tree(commit).is_file()

    def write_tree(self, commit: str, listing: Iterable[bytes]) -> None:
        """Write the listing of the whole commit, before its snapshot: without it, the client takes any part for all.

        ``listing`` is a ``tree_document``. Blocking.
        """
        place = self.tree(commit)
        with disk_errors(place):
            # Without this folder, ``hf cache ls`` warns of a corrupt repository until the pull ends.
            for folder in (place.parent, self.snapshot(None)):
                make_folder(folder)
            self._replace(place, listing)

    def write_ref(self, commit: str) -> None:
        """Let the requested revision name the commit, after its snapshot. Nothing to do for a commit. Blocking."""
        with disk_errors(self._ref):
            if not self.has_ref(commit):
                make_folder(self._ref.parent)
                self._replace(self._ref, (commit.encode(),))

    def _replace(self, place: Path, content: Iterable[bytes]) -> None:
        """Atomically and durably, beside other pulls. ``refs`` never holds an unfinished file: it would be a ref."""
        descriptor, aside = tempfile.mkstemp(prefix=".bdn-", dir=self.folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.writelines(content)
                file.flush()
                os.fchmod(descriptor, _MODE)
                os.fsync(descriptor)
            Path(aside).replace(place)
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise
        sync_folder(place.parent)

    def tree(self, commit: str) -> Path:
        return self.folder / "trees" / f"{commit}.json"

    @property
    def _ref(self) -> Path:
        return self.folder / "refs" / (self.uri.revision or "main")


def tree_document(entries: Iterable[bytes]) -> Iterator[bytes]:
    """The content of ``trees/<commit>.json``, of the ``tree_entry`` of each file of the commit."""
    yield b'{"format_version": 1, "files": {'
    for separator, entry in zip(chain((b"\n",), repeat(b",\n")), entries, strict=False):
        yield separator + entry
    yield b"\n}}\n"


def tree_entry(file: HubFile) -> bytes:
    """Never names a xet hash: it would lead the client to the hub's xet storage."""
    entry: dict[str, object] = {"size": file.size, "blob_id": file.blob_id}
    if file.lfs_sha256 is not None:
        entry |= {"lfs_sha256": file.lfs_sha256, "lfs_size": file.size}
    return f"{json.dumps(file.path)}: {json.dumps(entry)}".encode()
