"""A manifest of a million files is staged in little memory: what each file takes, of which its pages are not counted."""

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from bdn.core.cache.index import CacheIndex, Holder
from bdn.core.chunk import Digest, FileLayout, Slice
from bdn.core.layout import Layout
from node_agent.cache.records import Held, ManifestRecords
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles
from node_agent.fetch.fill_context import in_order
from tests.support.agent.cache import at_once
from tests.support.content.layouts import held_of
from tests.support.content.names import named

FILES = 10_000
NAMES = sorted(named(str(number)).hex for number in range(FILES))
SLAB = named("slab")


def layouts() -> dict[str, FileLayout]:
    found: dict[str, FileLayout] = {}
    for at, name in enumerate(NAMES):
        digest = Digest(name)
        place = Slice(SLAB, 1000 * 8000, 1000 * (at % 8000))
        found[f"train-{name[:2]}/sample-{name}.json"] = FileLayout(digest, 1000, (digest,), place)
    return found


with mock.patch("bdn.core.manifest._CUT_BYTES", 64 * 1024):  # one page at a time is read, which is not counted either
    HELD = held_of(layouts())
MANIFEST = HELD.manifest


def read_manifest(_: Path) -> object:
    return replace(Held.of(HELD.root, HELD.pages), layout=HELD.layout)


def read_layout(_: Path) -> object:
    return Layout.of(HELD.root, HELD.pages)


def save(folder: Path) -> object:
    ManifestRecords(Places(folder)).save(HELD, 1000.0)
    return None


def order_what_is_missing(_: Path) -> object:
    layout = Layout.of(HELD.root, HELD.pages)
    return layout, in_order(layout, replace(HELD, layout=layout).file_layouts(MANIFEST.contents))


def hold(_: Path) -> object:
    """As they are filled: each of the names is another object than the manifest's."""
    index = CacheIndex()
    at_once(index.admitting(MANIFEST.digest, MANIFEST.contents, Holder("stage", "job"), now=0, budget=10**9))
    for name in NAMES:
        index.commit(Digest("".join([*name])))
    return index


def appear(folder: Path) -> object:
    files = WholeFiles(Places(folder))
    aside = folder / "aside"
    for name in NAMES[:1000]:
        aside.touch()
        place = files.places.file(Digest(name))
        place.parent.mkdir(parents=True, exist_ok=True)
        files.appear(Digest("".join([*name])), aside)
    return files


@pytest.mark.parametrize(("work", "count", "most", "left"), [
    (read_manifest, FILES, 600, 420),
    (read_layout, FILES, 160, 60),
    (save, FILES, 260, 10),
    (order_what_is_missing, FILES, 160, 100),
    (hold, FILES, 180, 120),
    (appear, 1000, 400, 80),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_a_file_takes_so_many_bytes_at_the_most_and_so_many_afterwards(
    work: Callable[[Path], object], count: int, most: int, left: int, tmp_path: Path
) -> None:
    Places(tmp_path).make()
    assert MANIFEST.contents  # made once, for all
    gc.collect()
    tracemalloc.start()
    try:
        result = work(tmp_path)
        gc.collect()
        now, peak = (size / count for size in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    del result
    assert peak <= most
    assert now <= left
