"""What every Source promises (``core/source/upstream.py``), whatever the upstream. Suites inherit it and fill their upstream."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import pytest

from bdn.core.chunk import UnsafePathError, check_tree, normalise_path
from bdn.core.errors import BdnError
from bdn.core.source.upstream import Source, UpstreamFile
from tests.doubles.ranges import read_range

CONTENT = bytes(range(256)) * 40
AWKWARD_NAMES = (
    "a b.txt", "a+b.txt", "100%.txt", "x%20y.txt", "q?r=s&t#u.txt", "ünïcödé/日本語.bin", "quote'\"quote", ".hidden/.file",
    "tilde~(1),[2];=@$!*.txt", "tab\there.txt",
)  # fmt: skip
END = len(CONTENT)
EDGES = ((0, 1), (0, END), (1, END), (255, 258), (END - 1, END), (END - 1, END + 99))


class Upstream(Protocol):
    """One source of the upstream under test, reached without the code under test."""

    def fill(self, files: Mapping[str, bytes]) -> None:
        """Add or replace these, by path relative to the source, exactly as named."""

    def open(self) -> AbstractAsyncContextManager[Source]:
        """The source with credentials that may read it."""


async def listed(source: Source) -> dict[str, UpstreamFile]:
    """The listing by path."""
    return {file.path: file async for file in source.list(await source.resolve())}


async def only_file(source: Source) -> UpstreamFile:
    """The file of a source that has one."""
    (file,) = (await listed(source)).values()
    return file


async def listed_within(source: Source, *within: str) -> list[str]:
    """The paths of a listing narrowed to these beginnings, sorted."""
    return sorted([file.path async for file in source.list(await source.resolve(), within)])


async def seen_before(error: type[BdnError], said: str, opened: AbstractAsyncContextManager[Source]) -> list[str]:
    """The paths of a listing that ends with this error."""
    seen: list[str] = []

    async def read() -> None:
        async with opened as source:
            async for file in source.list(await source.resolve()):
                seen.append(file.path)

    with pytest.raises(error, match=said):
        await read()
    return seen


async def consumed(files: AsyncIterator[UpstreamFile]) -> int:
    """How many files a listing yields, read to its end."""
    return len([file async for file in files])


class FileContract(ABC):
    """What a source promises about a single file, such as ``weights.bin``."""

    @pytest.fixture
    @abstractmethod
    def upstream(self) -> Upstream: ...

    async def test_a_location_answers_exactly_the_range_asked_for_as_far_as_the_file_goes(
        self, upstream: Upstream
    ) -> None:
        upstream.fill({"weights.bin": CONTENT})
        async with upstream.open() as source:
            location = await source.locate(await only_file(source))
        for start, stop in EDGES:
            answer = read_range(location, start, stop)
            assert (answer.status, answer.content) == (206, CONTENT[start:stop])
            last = min(stop, END) - 1
            assert answer.headers["content-range"] == f"bytes {start}-{last}/{END}"
            assert location.etag in (None, answer.headers.get("etag"))

    async def test_a_range_behind_the_end_is_refused(self, upstream: Upstream) -> None:
        for content in (CONTENT, b""):
            upstream.fill({"weights.bin": content})
            async with upstream.open() as source:
                file = await only_file(source)
                assert file.size == len(content)
                assert read_range(await source.locate(file), file.size, file.size + 1).status == 416

    async def test_the_old_location_of_a_replaced_file_never_answers_with_new_bytes(self, upstream: Upstream) -> None:
        upstream.fill({"weights.bin": b"before"})
        async with upstream.open() as source:
            location = await source.locate((await listed(source))["weights.bin"])
            upstream.fill({"weights.bin": b"after!"})
            answer = read_range(location, 0, 6)
            assert answer.content == b"before" if answer.status == 206 else answer.status in (404, 412)

    async def test_a_replaced_file_has_another_version_and_can_be_read(self, upstream: Upstream) -> None:
        found = []
        for content in (b"before", b"after!"):
            upstream.fill({"weights.bin": content})
            async with upstream.open() as source:
                found.append((await listed(source))["weights.bin"])
                assert read_range(await source.locate(found[-1]), 0, 6).content == content
        assert found[0].version != found[1].version

    async def test_a_resolution_is_enough_for_another_instance_to_list_and_locate(self, upstream: Upstream) -> None:
        upstream.fill({"weights.bin": CONTENT})
        async with upstream.open() as source:
            resolution = await source.resolve()
        async with upstream.open() as source:
            file = await anext(source.list(resolution))
        async with upstream.open() as source:
            location = await source.locate(file)
        assert read_range(location, 5, 9).content == CONTENT[5:9]


class SourceContract(FileContract):
    async def test_every_file_is_listed_with_its_path_and_size(self, upstream: Upstream) -> None:
        upstream.fill({"config.json": b"{}", "nested/deep/weights.bin": CONTENT, "empty": b""})
        async with upstream.open() as source:
            sizes = {path: file.size for path, file in (await listed(source)).items()}
        assert sizes == {"config.json": 2, "nested/deep/weights.bin": len(CONTENT), "empty": 0}

    async def test_awkward_names_are_listed_as_they_are_and_can_be_read(self, upstream: Upstream) -> None:
        upstream.fill({name: name.encode() for name in AWKWARD_NAMES})
        async with upstream.open() as source:
            files = await listed(source)
            assert set(files) == set(AWKWARD_NAMES)
            for name in AWKWARD_NAMES:
                assert read_range(await source.locate(files[name]), 0, 100).content == name.encode()

    async def test_a_narrowed_listing_holds_what_it_has_to_and_each_file_once(self, upstream: Upstream) -> None:
        paths = ("a.txt", "sub/a.txt", "sub/ü b+%.txt", "sub-2/a.txt", "subway", "z/sub/a.txt")
        upstream.fill(dict.fromkeys(paths, b"x"))
        for within in (("",), ("sub",), ("sub/",), ("sub/ü b+%",), ("sub/", "z/s"), ("none",), ("a.txt",)):
            async with upstream.open() as source:
                found = await listed_within(source, *within)
            assert len(found) == len(set(found)), within
            assert {path for path in paths if path.startswith(within)} <= set(found) <= set(paths), within

    @pytest.mark.parametrize("path", ["a/../../etc/passwd", "../up", "back\\slash", "nul\0byte", "x" * 300])
    async def test_a_path_that_must_not_become_a_file_is_listed_for_the_selector_to_refuse(
        self, upstream: Upstream, path: str
    ) -> None:
        upstream.fill({"good.txt": b"x", path: b"x"})
        async with upstream.open() as source:
            files = await listed(source)
        [impossible] = set(files) - {"good.txt"}
        with pytest.raises(UnsafePathError):
            normalise_path(impossible)

    async def test_a_path_that_is_both_a_file_and_a_folder_is_listed_twice_for_the_tree_to_refuse(
        self, upstream: Upstream
    ) -> None:
        upstream.fill({"a": b"file", "a/b": b"below"})
        async with upstream.open() as source:
            files = await listed(source)
        assert set(files) == {"a", "a/b"}
        with pytest.raises(UnsafePathError):
            check_tree(files)

    async def test_an_unchanged_file_keeps_its_identity(self, upstream: Upstream) -> None:
        upstream.fill({"kept.bin": CONTENT, "changed.bin": b"before"})
        async with upstream.open() as source:
            before = await listed(source)
        upstream.fill({"changed.bin": b"after!"})
        async with upstream.open() as source:
            after = await listed(source)
        assert after["kept.bin"].identity == before["kept.bin"].identity
        assert after["changed.bin"].identity != before["changed.bin"].identity

    async def test_equal_size_and_path_do_not_make_equal_identities(self, upstream: Upstream) -> None:
        upstream.fill({"one.bin": b"aaaa", "two.bin": b"bbbb"})
        async with upstream.open() as source:
            files = await listed(source)
        assert files["one.bin"].identity.key != files["two.bin"].identity.key

    async def test_a_listing_can_be_abandoned_and_begun_again(self, upstream: Upstream) -> None:
        upstream.fill({f"{number:03}.txt": b"x" for number in range(20)})
        async with upstream.open() as source:
            resolution = await source.resolve()
            async for file in source.list(resolution):
                assert file.path == "000.txt"
                break
            assert await consumed(source.list(resolution)) == 20
