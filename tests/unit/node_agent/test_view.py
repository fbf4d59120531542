import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bdn.core.chunk import EMPTY, Manifest
from bdn.core.errors import CanceledError
from node_agent.disk.places import Places
from node_agent.stage.view.build import Built, Difference, build_view, compare_view
from tests.support.agent.cache import cached
from tests.support.content.trees import tree
from tests.support.crash.scripted_writes import failing

FILES = {
    "config.json": b"{}", "a name with spaces.bin": b"spaces", "\u00fc\u4e2d/\U0001f600.txt": b"unicode",
    "deep/er/and/deeper/file": b"deep", "deep/er/sibling": b"sibling", "deep.first": b"sorted between",
    "same/content": b"deep", "empty": b"", "also/empty": b"", "-rf": b"a name like an option",
    "x" * 255: b"as long as a name can be",
}  # fmt: skip


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def build(places: Places, manifest: Manifest, root: Path, stop: threading.Event | None = None) -> Built:
    return build_view(manifest, root, places.files, stop or threading.Event())


def test_a_view_is_the_tree_of_its_manifest_and_takes_no_space(tmp_path: Path) -> None:
    places, manifest = cached(tmp_path / "cache", FILES)

    built = build(places, manifest, tmp_path / "view")

    assert tree(tmp_path / "view") == FILES
    assert built == Built("hardlink", None)
    for entry in manifest.files:
        assert (tmp_path / "view" / entry.path).samefile(places.file(entry.digest))


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o000])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, mask: int) -> None:
    places, manifest = cached(tmp_path / "cache", FILES)

    with umask(mask):
        build(places, manifest, tmp_path / "view")

    folders = [tmp_path / "view", *(path for path in (tmp_path / "view").rglob("*") if path.is_dir())]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o755}


def test_a_path_as_long_as_a_manifest_allows_has_its_place(tmp_path: Path) -> None:
    path = "/".join(["d" * 200] * 15)
    places, manifest = cached(tmp_path / "cache", {path: b"far"})
    root = tmp_path / ("r" * 200) / ("r" * 200) / ("r" * 200) / ("r" * 200) / ("r" * 200)
    root.parent.mkdir(parents=True)

    build(places, manifest, root)  # together longer than PATH_MAX

    assert compare_view(manifest, root, places) == Difference(None, None)


def test_a_file_with_too_many_links_is_copied_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places, manifest = cached(tmp_path / "cache", FILES)
    real = os.link

    def link(source: bytes, *names: object, **folders: int) -> None:
        if source.decode().endswith(EMPTY.hex):
            raise OSError(errno.EMLINK, "Too many links")
        real(source, *names, **folders)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", link)
    built = build(places, manifest, tmp_path / "view")

    assert built == Built("hardlink", "2 files were copied: too many links")
    assert tree(tmp_path / "view") == FILES
    assert compare_view(manifest, tmp_path / "view", places).is_intact


def test_copying_stops_when_nobody_waits_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places, manifest = cached(tmp_path / "cache", {"a": b"a"})
    stop = threading.Event()
    stop.set()

    monkeypatch.setattr(os, "link", failing(errno.EXDEV))
    with pytest.raises(CanceledError):
        build(places, manifest, tmp_path / "view", stop)


@pytest.mark.parametrize("kernel_copy", [True, False])
def test_the_copy_is_right_with_and_without_the_kernels_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_copy: bool
) -> None:
    places, manifest = cached(tmp_path / "cache", FILES)

    monkeypatch.setattr(os, "link", failing(errno.EXDEV))
    if not kernel_copy:
        monkeypatch.setattr(os, "copy_file_range", failing(errno.EXDEV))
    built = build(places, manifest, tmp_path / "view")

    assert tree(tmp_path / "view") == FILES
    assert built.kind in ("copy", "reflink")
    assert "no hard links: Invalid cross-device link" in (built.reason or "")


# --- is it still the view that we made? ---


@pytest.fixture
def view(tmp_path: Path) -> tuple[Places, Manifest, Path]:
    places, manifest = cached(tmp_path / "cache", FILES)
    build(places, manifest, tmp_path / "view")
    return places, manifest, tmp_path / "view"


@pytest.mark.parametrize(("path", "content", "expected"), [
    ("config.json", None, Difference("config.json", None)),
    ("deep/notes.txt", "mine", Difference(None, "deep/notes.txt")),
    ("config.json", "[]", Difference(None, "config.json")),  # as long as ours
], ids=["missing", "added", "replaced"])  # fmt: skip
def test_a_file_that_is_missing_added_or_replaced_is_named(
    view: tuple[Places, Manifest, Path], path: str, content: str | None, expected: Difference
) -> None:
    places, manifest, root = view
    (root / path).unlink(missing_ok=True)
    if content is not None:
        (root / path).write_text(content)
    assert compare_view(manifest, root, places) == expected


def test_a_link_in_the_place_of_a_file_is_not_ours(view: tuple[Places, Manifest, Path]) -> None:
    places, manifest, root = view
    (root / "config.json").unlink()
    (root / "config.json").symlink_to(places.file(manifest.files[0].digest))

    assert compare_view(manifest, root, places).foreign == "config.json"


def test_files_are_ours_after_their_content_left_the_cache(view: tuple[Places, Manifest, Path]) -> None:
    places, manifest, root = view
    for entry in manifest.files:
        places.file(entry.digest).unlink(missing_ok=True)

    assert compare_view(manifest, root, places).is_intact
