"""The start: what is on disk decides what the cache holds. Interrupted evictions are finished, wrong files quarantined."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from bdn.core.chunk import Digest, MalformedDocumentError, Manifest
from bdn.core.events import Event
from bdn.disk.durable import disk_errors
from node_agent.cache.held_chunks import HeldChunks
from node_agent.cache.node_cache import ScannedManifest
from node_agent.cache.quarantine import Quarantine
from node_agent.cache.records import Held, ManifestRecords
from node_agent.disk.places import Places

logger = logging.getLogger(__name__)


class Scanner:
    """Looks through the cache directory once, before anything else uses it. Blocking; raises ``DiskFailedError``.

    Costs one look at every file's size. Content is not hashed: a file under its name was verified before it got there.
    """

    def __init__(self, places: Places, records: ManifestRecords, shelf: HeldChunks) -> None:
        self._places = places
        self._records = records
        self._shelf = shelf
        self.decisions: list[Event] = []  # what the look found and did

    def run(self) -> list[ScannedManifest]:
        """Find out, tidy up, and put what is held on the shelf; the least recently used manifest is the first."""
        with disk_errors(self._places.root):
            manifests = dict(self._manifests())
            sizes = {digest: size for manifest in manifests.values() for digest, size in manifest.contents.items()}
            whole = self._whole_files(sizes)
            begun = self._parts(sizes, whole)
            self._stray_layouts(manifests)
            found: list[ScannedManifest] = []
            for digest, manifest in manifests.items():
                here = {
                    content: content in whole for content in manifest.contents if content in whole or content in begun
                }
                found.append(ScannedManifest(digest, manifest.contents, here, self._records.last_used(digest)))
                self._shelf.add(Held(manifest, self._records.load_layout(digest)))
        self.decisions += [
            Event.of(
                "found",
                {
                    "bytes_total": sum(one.contents.values()),
                    "bytes_whole": sum(one.contents[content] for content, is_whole in one.present.items() if is_whole),
                },
                manifest=one.manifest,
            )
            for one in found
        ]
        return sorted(found, key=lambda one: one.last_used)

    def _manifests(self) -> Iterator[tuple[Digest, Manifest]]:
        for path in sorted(self._places.manifests.glob("*.json")):
            name, _, kind = path.name.partition(".")
            if kind != "json":
                continue
            try:
                manifest = self._records.load(Digest(name))
            except (MalformedDocumentError, ValueError):
                manifest = None
            if manifest is None:
                self._quarantine(path)
                self._note_damaged_record(name)
            else:
                yield manifest.digest, manifest

    def _note_damaged_record(self, name: str) -> None:
        if (digest := _digest(name)) is not None:
            why = "its record was damaged when the agent started, and is in quarantine"
            self.decisions.append(Event.of("dropped", {"why": why}, manifest=digest))

    def _whole_files(self, sizes: dict[Digest, int]) -> set[Digest]:
        whole: set[Digest] = set()
        unfinished = 0
        for entry in _walk(self._places.files):
            digest = _digest(entry.name)
            size = sizes.get(digest) if digest else None
            if entry.name.startswith("."):
                Path(entry.path).unlink()  # a small file that was being written
                unfinished += 1
            elif size is None or digest is None:
                self._remove(Path(entry.path))  # nobody names it: an eviction was interrupted
            elif (actual := entry.stat().st_size) != size:
                self._quarantine(Path(entry.path))
                reason = f"the file had {actual} bytes and not {size}, and is in quarantine"
                self.decisions.append(Event.of("damaged", {"tier": "node", "reason": reason}, digest=digest))
            else:
                self._take_over(Path(entry.path), digest)
                whole.add(digest)
        if unfinished:
            logger.info("removed %s small files that were being written when the agent ended", unfinished)
        self._remove_old_folders()
        return whole

    def _take_over(self, path: Path, digest: Digest) -> None:
        """A file used to stand one folder deeper, in ``aa/bb``. Views have it by its inode, and notice nothing."""
        place = self._places.file(digest)
        if path != place:
            path.rename(place)

    def _remove_old_folders(self) -> None:
        for folder in self._places.files.glob("??/??"):
            folder.rmdir()

    def _parts(self, sizes: dict[Digest, int], whole: set[Digest]) -> set[Digest]:
        begun: set[Digest] = set()
        for entry in _walk(self._places.filling):
            stem, _, kind = entry.name.partition(".")
            digest = _digest(stem)
            if digest is None or digest not in sizes or digest in whole:
                self._remove(Path(entry.path))
            elif kind == "part":
                begun.add(digest)
            elif not self._places.part(digest).exists():
                self._remove(Path(entry.path))
        return begun

    def _stray_layouts(self, manifests: dict[Digest, Manifest]) -> None:
        for path in self._places.manifests.iterdir():
            digest = _digest(path.name.partition(".")[0])
            if digest not in manifests or path.name.endswith(".tmp"):
                self._remove(path)

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        logger.info("removed %s: no manifest names it", path)

    def _quarantine(self, path: Path) -> None:
        place = Quarantine(self._places.quarantine).take(path)
        logger.warning("moved %s to %s: it is not what its name says", path, place)


def _walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path))
            else:
                yield entry


def _digest(name: str) -> Digest | None:
    try:
        return Digest(name)
    except ValueError:
        return None
