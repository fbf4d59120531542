"""A stage's view of one repository, as in the cache of the hub's client: ``models--org--name`` with all that it needs.

Built of the parts of ``bdn pull --hub-cache``, into a folder that is the agent's own and appears whole.
"""

import os
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import InvalidRequestError
from bdn.core.layout import Manifest
from bdn.disk.durable import disk_errors, remove_tree
from bdn.local.hub_cache import HubRepository
from node_agent.disk.whole_files import WholeFiles
from node_agent.stage.view.build import Built, save_pins, unlink_files
from node_agent.stage.view.hub import HubSnapshot

_COSTS: Final = {"hardlink": 0, "reflink": 1, "copy": 2}
_STAGE: Final = "stg_view"  # names the folder in which blobs are built; nothing else builds below the root


@dataclass(frozen=True, slots=True)
class HubCommit:
    """One commit, and the revision that was requested. ``tree``: where the listing of the whole commit is kept."""

    repository: HubRepository
    commit: str
    manifest: Manifest
    tree: Path


@dataclass(frozen=True, slots=True)
class HubFolder:
    """Commits of one repository, which share blobs. Methods block."""

    commits: tuple[HubCommit, ...]

    def build(self, root: Path, files: WholeFiles, stop: threading.Event) -> Built:
        """As ``View.build``; also raises ``InvalidRequestError``: a commit's listing is wrong."""
        with disk_errors(root):
            root.mkdir()
            built = [_add(one, root, files, stop) for one in self.commits]
            for folder, _, _ in os.walk(root):
                Path(folder).chmod(0o755)  # whatever the umask
        return max(built, key=lambda one: _COSTS[one.kind])

    def is_intact(self, root: Path, files: WholeFiles) -> bool:
        return all(_is_intact(one, root, files) for one in self.commits)

    def remove(self, root: Path, files: WholeFiles) -> None:
        contents: dict[str, Digest] = {}
        for one in self.commits:
            with suppress(InvalidRequestError):  # no listing yet, so no blobs either; or it was damaged
                blobs = _snapshot(_at(one, root), one, files).blobs(one.manifest)
                contents |= {etag: entry.digest for etag, entry in blobs.items()}
        unlink_files(root / "blobs", contents, files)
        remove_tree(root)
        for one in self.commits:
            save_pins(one.manifest, files)


def _add(one: HubCommit, root: Path, files: WholeFiles, stop: threading.Event) -> Built:
    repository = _at(one, root)
    repository.write_tree(one.commit, (one.tree.read_bytes(),))
    snapshot = _snapshot(repository, one, files)
    try:
        snapshot.blobs(one.manifest)
    except InvalidRequestError:
        one.tree.unlink(missing_ok=True)  # the listing is wrong: the next attempt requests it again
        raise
    try:
        built, _ = snapshot.build(one.manifest, None, stop)
        snapshot.publish(one.manifest, None)
    finally:
        snapshot.clear()
    repository.write_ref(one.commit)
    return built


def _is_intact(one: HubCommit, root: Path, files: WholeFiles) -> bool:
    repository = _at(one, root)
    is_listed = repository.tree(one.commit).read_bytes() == one.tree.read_bytes()
    return is_listed and repository.has_ref(one.commit) and _snapshot(repository, one, files).shows(one.manifest)


def _at(one: HubCommit, root: Path) -> HubRepository:
    return replace(one.repository, folder=root)


def _snapshot(repository: HubRepository, one: HubCommit, files: WholeFiles) -> HubSnapshot:
    return HubSnapshot(repository.snapshot(one.commit), _STAGE, files)
