"""Roots and pages survive a round trip, follow from the tree alone, change where the tree changes, and are malformed or whole."""

import json
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.chunk import CHUNK_SIZE, EMPTY, Digest, MalformedDocumentError, UnsafePathError, check_tree, digest_of
from bdn.core.manifest import (
    SMALL_FILE_SIZE,
    Document,
    ManifestWriter,
    PlacedFile,
    Root,
    empty_file,
    files_of,
    is_small,
    large_file,
    read_page,
    slab_cutter,
    slab_layouts,
)
from tests.support.content.names import named

Tree = dict[str, tuple[int, bytes]]  # by path: size, and what the bytes depend on


def placed_files(tree: Iterable[tuple[str, tuple[int, bytes]]]) -> list[PlacedFile]:
    """As a mirror or a pusher makes them, without bytes: a slab is named by what is in it."""
    placed: list[PlacedFile] = []
    cutter = slab_cutter()

    def place(slab: list[tuple[str, int, Digest]]) -> None:
        name = digest_of(b"".join(digest.to_bytes() for _, _, digest in slab))
        placed.extend(slab_layouts(slab, name, sum(size for _, size, _ in slab)))

    for path, (size, seed) in sorted(tree):
        if is_small(size):
            for slab in cutter.add((path, size, digest_of(b"%d %b" % (size, seed))), path, size):
                place(slab)
        else:
            chunks = tuple(digest_of(b"%d %b" % (at, seed)) for at in range(0, size, CHUNK_SIZE))
            placed.append(large_file(path, size, chunks) if size else empty_file(path))
    for slab in cutter.finish():
        place(slab)
    return sorted(placed, key=lambda file: file.path)


def written(files: Iterable[PlacedFile]) -> tuple[Root, list[Document]]:
    """The root, and the pages."""
    writer = ManifestWriter()
    documents = [document for file in files for document in writer.add(file)]
    *last, root = writer.finish()
    assert root.digest == writer.root.digest == digest_of(root.content)
    return Root.parse(root.content), documents + last


def is_tree(tree: Tree) -> bool:
    try:
        check_tree(list(tree))
    except UnsafePathError:
        return False
    return True


words = st.sampled_from(["a", "b", "ab", "é", "😀", "\uffff", "a b", '"', "\n", ".x"])
paths = st.lists(words, min_size=1, max_size=3).map("/".join)
sizes = st.one_of(
    st.integers(0, 100),
    st.sampled_from([SMALL_FILE_SIZE - 1, SMALL_FILE_SIZE, CHUNK_SIZE, CHUNK_SIZE + 1, 5 * CHUNK_SIZE]),
)
trees = st.dictionaries(paths, st.tuples(sizes, st.binary(max_size=1)), min_size=1, max_size=8).filter(is_tree)


@given(trees, st.randoms(use_true_random=False))
def test_a_manifest_survives_a_round_trip_and_does_not_depend_on_order(tree: Tree, order: random.Random) -> None:
    files = placed_files(tree.items())
    root, pages = written(files)
    assert list(files_of(page.content for page in pages)) == files
    assert [(page.digest, len(page.content)) for page in pages] == [(ref.digest, ref.size) for ref in root.pages]
    assert (root.files_total, root.bytes_total) == (len(tree), sum(size for size, _ in tree.values()))
    shuffled = list(tree.items())
    order.shuffle(shuffled)
    assert written(placed_files(shuffled))[0] == root


@given(trees, trees)
def test_different_trees_have_different_names(one: Tree, other: Tree) -> None:
    of_one, of_other = (placed_files(tree.items()) for tree in (one, other))
    assert (written(of_one)[0].digest == written(of_other)[0].digest) == (of_one == of_other)


def test_files_out_of_order_are_refused() -> None:
    writer = ManifestWriter()
    list(writer.add(empty_file("b")))
    for path in ("a", "b"):
        with pytest.raises(ValueError, match="sorted by path"):
            list(writer.add(empty_file(path)))


def test_where_a_slab_ends_is_the_same_in_every_process() -> None:
    cutter = slab_cutter()
    slabs = [slab for number in range(250) for slab in cutter.add(number, str(number), 100_000)]
    assert list(map(len, slabs)) == [65, 38, 69]


def large_tree(files: int) -> Tree:
    return {f"data/{number // 100:03}/{number:05}.json": (3000 + number % 7, b"one") for number in range(files)}


def test_a_file_that_changes_changes_one_page_and_one_slab() -> None:
    """A cut depends on the file's path and weight, and on pieces before it only where one had to end for its size."""
    tree = large_tree(20_000)
    root, pages = written(placed_files(tree.items()))
    assert len(pages) > 1
    slabs = {chunk for page in pages for entry in read_page(page.content) for chunk in entry.fetched}
    assert len(slabs) > 10
    for path in (min(tree), sorted(tree)[10_000], max(tree)):
        changed = written(placed_files((tree | {path: (tree[path][0], b"another")}).items()))
        found = {chunk for page in changed[1] for entry in read_page(page.content) for chunk in entry.fetched}
        assert len(found - slabs) == 1
        # Two, where the slab has files on both sides of a page's end.
        assert len({page.digest for page in changed[1]} - {ref.digest for ref in root.pages}) <= 2


def test_no_document_is_larger_than_a_chunk_and_a_file_of_many_chunks_goes_on() -> None:
    chunks = tuple(named(str(number)) for number in range(150_001))
    long_paths = [f"{'é' * 120}/{'x' * 250}/{number:06}" for number in range(10_000)]
    files = [large_file("a.bin", 150_000 * CHUNK_SIZE + 1, chunks), *map(empty_file, long_paths)]
    files += [large_file("z.bin", 150_000 * CHUNK_SIZE + 1, chunks)]
    root, pages = written(sorted(files, key=lambda file: file.path))
    assert all(len(page.content) <= CHUNK_SIZE for page in pages)
    assert len(root.content) <= CHUNK_SIZE
    assert list(files_of(page.content for page in pages)) == sorted(files, key=lambda file: file.path)
    for path in ("a.bin", "z.bin", long_paths[5000]):
        found = [page for page in pages if any(entry.path == path for entry in read_page(page.content))]
        assert {page.digest for page in found} <= {ref.digest for ref in root.pages_of(path)}
    with pytest.raises(MalformedDocumentError):
        list(files_of(page.content for page in pages[1:]))
    for first, second in [*pairwise(range(len(pages)))][:2]:
        swapped = [*pages[:first], pages[second], pages[first], *pages[second + 1 :]]
        with pytest.raises(MalformedDocumentError):
            list(files_of(page.content for page in swapped))


# --- documents that nobody wrote ---

FILES = placed_files({"a": (0, b""), "b": (5, b"x"), "c": (7, b"y"), "d": (3 * CHUNK_SIZE, b"z")}.items())
ROOT, PAGES = written(FILES)
PAGE = PAGES[0].content
values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5),
        st.sampled_from([str(named("one")), str(EMPTY), "a", "\ud800", "../a", 0, 1, -1, 2**63, 10**400, [], {}]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["a", "size"]), inner)),
    max_leaves=6,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: object) -> Any:
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = replaced(value[path[0]], path[1:], new)
    return copied


def read_all(content: bytes) -> None:
    list(files_of([content]))


def read_entries(content: bytes) -> None:
    for entry in read_page(content):
        assert entry.fetched is not None


readers: list[tuple[Callable[[bytes], object], bytes]] = [
    (Root.parse, ROOT.content), (read_all, PAGE), (read_entries, PAGE),
]  # fmt: skip


@given(st.sampled_from(readers), st.data())
def test_a_document_with_another_value_is_read_or_malformed(
    reader: tuple[Callable[[bytes], object], bytes], data: st.DataObject
) -> None:
    read, whole = reader
    body = json.loads(whole)
    place = data.draw(st.sampled_from(places(body)))
    hostile = json.dumps(replaced(body, place, data.draw(values))).encode()
    with suppress(MalformedDocumentError):
        read(hostile)


@given(st.sampled_from(readers), st.data())
def test_a_document_with_other_bytes_is_read_or_malformed(
    reader: tuple[Callable[[bytes], object], bytes], data: st.DataObject
) -> None:
    read, whole = reader
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, min(len(whole), start + 100)))
    with suppress(MalformedDocumentError):
        read(whole[:start] + data.draw(st.binary(max_size=4)) + whole[stop:])


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b"null", b"\xff", b"NaN"])
@pytest.mark.parametrize("read", [Root.parse, read_page, read_all])
def test_what_is_no_document_is_malformed(read: Callable[[bytes], object], content: bytes) -> None:
    with pytest.raises(MalformedDocumentError):
        read(content)
