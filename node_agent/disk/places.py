"""Paths below the agent's cache directory."""

from pathlib import Path
from typing import Final

from bdn.core.chunk import Digest
from bdn.disk.durable import make_folder, sync_folder

_PRIVATE: Final = 0o700
_PASSABLE: Final = 0o711  # other users may pass if they know a stage's id, but not list
_PUBLIC: Final = 0o755


def name_in_files(digest: Digest) -> str:
    """Path of a whole file below ``Places.files``.

    256 folders, not 65,536 as in the mirror's store: a million small files make 4,000 per folder, which costs nothing,
    while making a folder costs as much as making four files.
    """
    return f"{digest.hex[:2]}/{digest.hex}"


def temporary_name(digest: Digest) -> str:
    """Path of a small file below ``Places.files`` until it is whole. The dot distinguishes it from whole files."""
    return f"{digest.hex[:2]}/.{digest.hex}"


class Places:
    """Paths only. ``files`` contains whole files by digest; files in progress are in ``filling``.

    Content is private to the agent: other users of the machine reach it through their views.
    """

    def __init__(self, root: Path, mounts: Path | None = None) -> None:
        self.root = root.absolute()
        self.owner = self.root / "owner"
        self.format = self.root / "format"
        self.files = self.root / "files"
        self.filling = self.root / "filling"
        self.manifests = self.root / "manifests"
        self.stages = self.root / "stages"
        self.views = self.root / "views"
        self.quarantine = self.root / "quarantine"
        self.journal = self.root / "journal"
        self.trusted_keys = self.root / "trusted-keys.json"
        self.scrub = self.root / "scrub.json"
        self.members = self.root / "members.json"
        self.mounts = (mounts or self.root / "mounts").absolute()

    def make(self) -> None:
        """Make absent folders, and sync all names: a kill may have come between a name and its sync."""
        absent = [folder for folder in (self.root, *self.root.parents) if not folder.is_dir()]
        make_folder(self.root, _PUBLIC)  # a folder that the operator made keeps its mode
        for folder in (self.files, self.filling, self.manifests, self.stages, self.quarantine):
            make_folder(folder, _PRIVATE)
        make_folder(self.views, _PASSABLE)
        make_folder(self.mounts, _PASSABLE)
        fanout = [self.files / f"{number:02x}" for number in range(256)]
        for folder in fanout:
            folder.mkdir(mode=_PRIVATE, exist_ok=True)
        named = (*fanout, self.files, self.filling, self.manifests, self.stages, self.root)
        for folder in (*named, *(folder.parent for folder in absent)):
            sync_folder(folder)

    def file(self, digest: Digest) -> Path:
        return self.files / name_in_files(digest)

    def part(self, digest: Digest) -> Path:
        return self.filling / f"{digest.hex}.part"

    def bitmap(self, digest: Digest) -> Path:
        """Records which chunks of a part are durable."""
        return self.filling / f"{digest.hex}.bitmap"

    def manifest(self, digest: Digest) -> Path:
        """The root of a held manifest; its modification time is the manifest's last use."""
        return self.document(digest, digest)

    def document(self, manifest: Digest, digest: Digest) -> Path:
        return self.manifests / manifest.hex / digest.hex

    def tree(self, manifest: Digest, commit: str) -> Path:
        """The listing of a hub's commit, as the cache of the hub's client has it; kept as long as the manifest."""
        return self.manifests / manifest.hex / f"{commit}.tree"

    def pins(self, digest: Digest) -> Path:
        """Times of a held manifest's whole files when their bytes were right; see ``WholeFiles``."""
        return self.manifests / digest.hex / "pins"

    def stage(self, stage_id: str) -> Path:
        return self.stages / f"{stage_id}.json"
