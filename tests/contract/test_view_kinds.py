"""Links, shared blocks and copies make the same view; only its cost differs."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from node_agent.stage.view.build import Built, build_view, compare_view
from tests.support.agent.cache import cached
from tests.support.agent.mounts import mounted_tmpfs, mounted_xfs, needs_mounts, needs_xfs
from tests.support.agent.rig import noise
from tests.support.content.trees import tree

FILES = {"large.bin": noise(3_000_000), "a b/\u00fc.txt": b"unicode", "empty": b"", "twice": b"unicode"}


class ViewKindContract:
    """Inherit, and give ``site``: where the cache stands, where the view shall, and what to expect."""

    @pytest.fixture
    def site(self, tmp_path: Path) -> tuple[Path, Path, Built]:
        raise NotImplementedError

    def test_the_view_is_the_tree_read_only_and_recognised(self, site: tuple[Path, Path, Built]) -> None:
        cache, root, expected = site
        places, manifest = cached(cache, FILES)

        built = build_view(manifest, root, places.files, threading.Event())

        assert built == expected
        assert tree(root) == FILES
        assert {path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_file()} == {0o444}
        assert compare_view(manifest, root, places).is_intact


class CopyContract(ViewKindContract):
    """Files of their own, which their owner can make writable."""

    def test_a_copy_that_somebody_wrote_to_is_not_ours(self, site: tuple[Path, Path, Built]) -> None:
        cache, root, _ = site
        places, manifest = cached(cache, FILES)
        build_view(manifest, root, places.files, threading.Event())
        (root / "twice").chmod(0o644)
        (root / "twice").write_bytes(b"UNICODE")

        assert compare_view(manifest, root, places).foreign == "twice"


class TestHardlinks(ViewKindContract):
    @pytest.fixture
    def site(self, tmp_path: Path) -> tuple[Path, Path, Built]:
        return tmp_path / "cache", tmp_path / "view", Built("hardlink", None)


@needs_mounts
class TestCopiesToAnotherFileSystem(CopyContract):
    @pytest.fixture
    def site(self, tmp_path: Path) -> Iterator[tuple[Path, Path, Built]]:
        reason = "no hard links: Invalid cross-device link; no reflinks: Invalid cross-device link"
        with mounted_tmpfs(tmp_path / "other", "16m") as other:
            yield tmp_path / "cache", other / "view", Built("copy", reason)


@needs_xfs
class TestReflinks(CopyContract):
    @pytest.fixture
    def site(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path, Built]]:
        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)  # xfs could link; this is a directory of another project quota, say
        with mounted_xfs(tmp_path / "xfs", tmp_path / "image") as xfs:
            yield xfs / "cache", xfs / "view", Built("reflink", "no hard links: Operation not permitted")

    def test_the_blocks_are_shared(self, site: tuple[Path, Path, Built]) -> None:
        cache, root, _ = site
        content = {"large": noise(40_000_000)}
        places, manifest = cached(cache, content)
        before = os.statvfs(cache).f_bfree

        build_view(manifest, root, places.files, threading.Event())

        assert (before - os.statvfs(cache).f_bfree) * 4096 < 4_000_000
