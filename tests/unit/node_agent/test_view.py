"""The view is the tree of its manifest, whether by links, shared blocks or copies, and what is not ours in it is found."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bdn.core.chunk import EMPTY
from bdn.core.errors import CanceledError
from bdn.core.layout import Manifest
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles
from node_agent.stage.view.build import Built, Difference, build_view, can_clone, compare_view
from tests.support.agent.cache import cached, whole_files
from tests.support.agent.mounts import mounted_tmpfs, mounted_xfs, needs_mounts, needs_xfs
from tests.support.content.noise import noise
from tests.support.content.trees import tree
from tests.support.crash.scripted_writes import failing

FILES = {
    "config.json": b"{}", "a name with spaces.bin": b"spaces", "\u00fc\u4e2d/\U0001f600.txt": b"unicode",
    "deep/er/and/deeper/file": b"deep", "deep/er/sibling": b"sibling", "deep.first": b"sorted between",
    "same/content": b"deep", "empty": b"", "also/empty": b"", "-rf": b"a name like an option",
    "x" * 255: b"as long as a name can be", "large.bin": noise(3_000_000),
}  # fmt: skip
LINKED = Built("hardlink", None)


@dataclass
class Site:
    """Where a cache stands, and where its view shall."""

    cache: Path
    root: Path
    expected: Built = LINKED
    places: Places = field(init=False)
    manifest: Manifest = field(init=False)
    files: WholeFiles = field(init=False)

    def build(self, files: dict[str, bytes] = FILES, stop: threading.Event | None = None) -> Built:
        self.places, self.manifest = cached(self.cache, files)
        self.files = whole_files(self.places)
        return build_view(self.manifest, self.root, self.files, stop or threading.Event())

    def difference(self) -> Difference:
        return compare_view(self.manifest, self.root, self.files)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "cache", tmp_path / "view")


# --- links, shared blocks and copies ---


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[Site]:
    reason = "no hard links: Invalid cross-device link; no reflinks: Invalid cross-device link"
    with mounted_tmpfs(tmp_path / "other", "16m") as other:
        yield Site(tmp_path / "cache", other / "view", Built("copy", reason))


@pytest.fixture
def reflinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(
        os, "link", failing(errno.EPERM)
    )  # xfs could link; this is another project quota's directory, say
    with mounted_xfs(tmp_path / "xfs", tmp_path / "image") as xfs:
        yield Site(xfs / "cache", xfs / "view", Built("reflink", "no hard links: Operation not permitted"))


COPIES = [pytest.param("copies", marks=needs_mounts), pytest.param("reflinks", marks=needs_xfs)]


@pytest.mark.parametrize("kind", ["site", *COPIES])
def test_a_view_is_the_tree_of_its_manifest_read_only_and_recognised(kind: str, request: pytest.FixtureRequest) -> None:
    site: Site = request.getfixturevalue(kind)

    assert site.build() == site.expected
    assert tree(site.root) == FILES
    assert {path.stat().st_mode & 0o777 for path in site.root.rglob("*") if path.is_file()} == {0o444}
    assert site.difference().is_intact
    for entry in site.manifest.files:
        is_the_cache_s = (site.root / entry.path).samefile(site.places.file(entry.digest))
        assert is_the_cache_s == (kind == "site")


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_that_somebody_wrote_to_is_not_ours(kind: str, request: pytest.FixtureRequest) -> None:
    site: Site = request.getfixturevalue(kind)
    site.build()
    (site.root / "same/content").chmod(0o644)
    (site.root / "same/content").write_bytes(b"DEEP")

    assert site.difference().foreign == "same/content"


@needs_xfs
def test_blocks_are_shared(reflinks: Site) -> None:
    places, manifest = cached(reflinks.cache, {"large": noise(40_000_000)})
    before = os.statvfs(reflinks.cache).f_bfree
    build_view(manifest, reflinks.root, whole_files(places), threading.Event())

    assert (before - os.statvfs(reflinks.cache).f_bfree) * 4096 < 4_000_000
    assert can_clone(reflinks.cache, reflinks.root)


@pytest.mark.parametrize("refused", [(), ("copy_file_range",), ("copy_file_range", "sendfile")], ids=str)
def test_the_copy_is_right_with_and_without_the_kernels_help(
    site: Site, monkeypatch: pytest.MonkeyPatch, refused: tuple[str, ...]
) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EXDEV))
    for call in refused:
        monkeypatch.setattr(os, call, failing(errno.EPERM))
    built = site.build()

    assert tree(site.root) == FILES
    assert built.kind in ("copy", "reflink")
    for entry in site.manifest.files:  # by which a later look knows without reading that nobody wrote to it
        copied, held = (path.stat() for path in (site.root / entry.path, site.places.file(entry.digest)))
        assert (copied.st_ino != held.st_ino, copied.st_mtime_ns) == (True, held.st_mtime_ns)
    assert "no hard links: Invalid cross-device link" in (built.reason or "")


def test_copying_stops_when_nobody_waits_any_more(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    stop.set()
    monkeypatch.setattr(os, "link", failing(errno.EXDEV))
    with pytest.raises(CanceledError):
        site.build(stop=stop)


def test_a_file_with_too_many_links_is_copied_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(source: str, *names: object, **folders: int) -> None:
        if source.endswith(EMPTY.hex):
            raise OSError(errno.EMLINK, "Too many links")
        real(source, *names, **folders)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", link)

    assert site.build() == Built("hardlink", "2 files were copied: too many links")
    assert tree(site.root) == FILES
    assert site.difference().is_intact


# --- folders ---


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o000])
def test_modes_do_not_depend_on_the_umask(site: Site, mask: int) -> None:
    with umask(mask):
        site.build()

    folders = [site.root, *(path for path in site.root.rglob("*") if path.is_dir())]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o755}


def test_a_path_as_long_as_a_manifest_allows_has_its_place(site: Site) -> None:
    site.root = site.cache.with_name("r" * 200) / "/".join(["r" * 200] * 4)
    site.root.parent.mkdir(parents=True)
    site.build({"/".join(["d" * 200] * 15): b"far"})  # together longer than PATH_MAX

    assert site.difference() == Difference(None, None)


# --- is it still the view that we made? ---


@pytest.mark.parametrize(("path", "content", "expected"), [
    ("config.json", None, Difference("config.json", None)),
    ("deep/notes.txt", "mine", Difference(None, "deep/notes.txt")),
    ("config.json", "[]", Difference(None, "config.json")),  # as long as ours
], ids=["missing", "added", "replaced"])  # fmt: skip
def test_a_file_that_is_missing_added_or_replaced_is_named(
    site: Site, path: str, content: str | None, expected: Difference
) -> None:
    site.build()
    (site.root / path).unlink(missing_ok=True)
    if content is not None:
        (site.root / path).write_text(content)

    assert site.difference() == expected


def test_a_link_in_the_place_of_a_file_is_not_ours(site: Site) -> None:
    site.build()
    (site.root / "config.json").unlink()
    (site.root / "config.json").symlink_to(site.places.file(site.manifest.files[0].digest))

    assert site.difference().foreign == "config.json"


def test_files_are_ours_after_their_content_left_the_cache(site: Site) -> None:
    site.build()
    for entry in site.manifest.files:
        site.places.file(entry.digest).unlink(missing_ok=True)

    assert site.difference().is_intact
