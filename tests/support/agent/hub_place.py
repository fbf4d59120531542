"""A cache that holds a tree, and beside it a cache of the hub's client, into which the tree is pulled."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from bdn.core.source.uri import parse_source
from bdn.local.hub_cache import HubRepository, tree_document, tree_entry
from bdn.wire.mirror_schema import HubFile
from node_agent.stage.view.destination import Earlier
from node_agent.stage.view.hub import HubSnapshot
from tests.doubles.hub_repository import HubFile as Listed
from tests.support.agent.cache import cached, whole_files
from tests.support.content.trees import tree

COMMIT: Final = "c0ffee" + "0" * 34
FILES: Final = {"config.json": b"{}", "a/b/deep.txt": b"deep", "empty": b"", "weights.safetensors": b"in LFS"}


def repository_with(root: Path, listed: Mapping[str, bytes]) -> HubRepository:
    """The folder of a repository in a hub cache, with the listing of a commit that has these files."""
    repository = HubRepository.of(parse_source("hf://org/model"), root)
    repository.write_tree(COMMIT, tree_document(map(tree_entry, hub_files(listed))))
    return repository


class HubPlace:
    """``listed`` are the files that the commit is said to have."""

    def __init__(self, root: Path, listed: Mapping[str, bytes] = FILES) -> None:
        self.places, self.manifest = cached(root / "cache", FILES)
        self.files = whole_files(self.places)
        self.root = root / "hub"
        self.listed = listed

    @property
    def repository(self) -> HubRepository:
        return HubRepository.of(parse_source("hf://org/model"), self.root)

    @property
    def snapshot(self) -> HubSnapshot:
        return HubSnapshot(self.repository.snapshot(COMMIT), "stg_x", self.files)

    def list(self) -> None:
        repository_with(self.root, self.listed)

    def build(self) -> HubSnapshot:
        snapshot = self.snapshot
        snapshot.build(self.manifest, None, threading.Event())
        return snapshot

    def pull(self) -> Earlier:
        """As command and agent do it, but for records."""
        self.list()
        snapshot = self.build()
        snapshot.publish(self.manifest, None)
        snapshot.settle()
        snapshot.clear()
        self.repository.write_ref(COMMIT)
        return Earlier(snapshot.inode() or 0, self.manifest.digest, self.manifest, 0)

    def restart(self) -> None:
        """Clear what was left unfinished, and believe the cache, as an agent does that has read it."""
        self.snapshot.clear()
        self.files = whole_files(self.places)

    def offline(self, revision: str = "main") -> dict[str, bytes] | None:
        """What the client takes for the whole, without the hub; None if it reports that something is missing."""
        try:
            found = snapshot_download("org/model", revision=revision, cache_dir=self.root, local_files_only=True)
            return tree(Path(found))
        except LocalEntryNotFoundError:  # and IncompleteSnapshotError
            return None


def hub_files(listed: Mapping[str, bytes]) -> list[HubFile]:
    """The listing of a commit with these files."""
    files = [Listed(path, content) for path, content in sorted(listed.items())]
    return [
        HubFile(path=file.path, size=file.size, blob_id=file.oid, lfs_sha256=file.sha256 if file.is_lfs else None)
        for file in files
    ]
