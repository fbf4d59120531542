"""What every Source of a bucket promises beyond the Source: what a prefix means, and which keys become files."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import ClassVar, Protocol

import pytest

from bdn.core.chunk import UnsafePathError, normalise_path
from bdn.core.errors import InvalidSourceError
from bdn.core.source.upstream import Source
from tests.contract.source_contract import CONTENT, consumed, listed, listed_within
from tests.doubles.ranges import read_range


class Bucket(Protocol):
    """A new bucket of the upstream under test, reached without the code under test."""

    def fill(self, files: Mapping[str, bytes]) -> None:
        """Add or replace these, by key, exactly as named."""

    def open(self, prefix: str = "") -> AbstractAsyncContextManager[Source]:
        """The source of this prefix, exactly as a URI would write it, with credentials that may read it."""


class BucketContract(ABC):
    keys_of_several_pages: ClassVar[int] = 1001

    @pytest.fixture
    @abstractmethod
    def bucket(self) -> Bucket: ...

    async def test_an_empty_prefix_is_the_whole_bucket(self, bucket: Bucket) -> None:
        bucket.fill({"a.bin": b"x", "m/b.bin": b"xy", "m/n/c.bin": b""})
        async with bucket.open() as source:
            sizes = {path: file.size for path, file in (await listed(source)).items()}
        assert sizes == {"a.bin": 1, "m/b.bin": 2, "m/n/c.bin": 0}

    async def test_a_prefix_without_a_slash_is_a_folder_and_not_the_beginning_of_a_name(self, bucket: Bucket) -> None:
        bucket.fill({"model/a.bin": b"x", "model-2/b.bin": b"x", "model.txt": b"x", "models": b"x"})
        async with bucket.open("model") as source:
            assert set(await listed(source)) == {"a.bin"}

    async def test_a_prefix_may_be_exactly_one_object(self, bucket: Bucket) -> None:
        keys = ("model.safetensors", "deep/folder/model.safetensors", "deep/a b+c%.bin", "ü/日")
        bucket.fill(dict.fromkeys(keys, CONTENT) | {f"{key}.sha256": b"x" for key in keys} | {"other": b"x"})
        for key in keys:
            name = key.rpartition("/")[2]
            async with bucket.open(key) as source:
                files = await listed(source)
                assert set(files) == {name}
                assert read_range(await source.locate(files[name]), 3, 9).content == CONTENT[3:9]
                assert await listed_within(source, name[0], "other/") == [name]
                assert await listed_within(source, "deep/") == []

    @pytest.mark.parametrize("marker", [{}, {"model/": b""}, {"model/": b"", "model/0/": b"", "model/1/": b""}])
    async def test_a_prefix_that_is_both_object_and_folder_asks_for_a_slash(
        self, bucket: Bucket, marker: dict[str, bytes]
    ) -> None:
        bucket.fill({"model": b"object", "model/a.bin": b"x", **marker})
        async with bucket.open("model") as source:
            with pytest.raises(InvalidSourceError, match=r"both an object and a folder; add a slash .*/model/$"):
                await listed(source)
        async with bucket.open("model/") as source:
            assert set(await listed(source)) == {"a.bin"}

    async def test_an_object_beside_an_empty_folder_of_its_name_is_the_object(self, bucket: Bucket) -> None:
        bucket.fill({"model": b"object", "model/": b""})
        async with bucket.open("model") as source:
            assert set(await listed(source)) == {"model"}

    async def test_folder_markers_are_not_files(self, bucket: Bucket) -> None:
        bucket.fill({"m/": b"", "m/sub/": b"", "m/sub/marked with content/": b"x", "m/sub/a.bin": b"x"})
        async with bucket.open("m/") as source:
            assert set(await listed(source)) == {"sub/a.bin"}

    async def test_nothing_below_a_prefix_is_an_empty_listing_and_no_error(self, bucket: Bucket) -> None:
        for prefix in ("", "none", "none/"):
            async with bucket.open(prefix) as source:
                assert await listed(source) == {}

    async def test_keys_with_empty_and_dot_segments_are_listed_normalised_and_can_be_read(self, bucket: Bucket) -> None:
        bucket.fill({"m/a//b.txt": b"empty", "m/c/./d.txt": b"a dot"})
        async with bucket.open("m") as source:
            files = await listed(source)
            assert set(files) == {"a/b.txt", "c/d.txt"}
            for path, content in (("a/b.txt", b"empty"), ("c/d.txt", b"a dot")):
                assert read_range(await source.locate(files[path]), 0, 5).content == content

    async def test_a_key_that_would_be_absolute_below_its_prefix_is_listed_for_the_selector_to_refuse(
        self, bucket: Bucket
    ) -> None:
        bucket.fill({"m//etc/passwd": b"x"})
        async with bucket.open("m") as source:
            assert set(await listed(source)) == {"/etc/passwd"}
        with pytest.raises(UnsafePathError, match="absolute"):
            normalise_path("/etc/passwd")

    @pytest.mark.parametrize("prefix", ["", "m", "m/"])
    async def test_a_narrowed_listing_is_no_wider_than_it_has_to_be(self, bucket: Bucket, prefix: str) -> None:
        folder = "m/" if prefix else ""
        paths = ("a.txt", "sub/a.txt", "sub/b.txt", "subway/c.txt", "x/sub/a.txt")
        bucket.fill({f"{folder}{path}": b"x" for path in paths})
        async with bucket.open(prefix) as source:
            assert await listed_within(source, "sub/") == ["sub/a.txt", "sub/b.txt"]
            assert await listed_within(source, "sub/b", "x/") == ["sub/b.txt", "x/sub/a.txt"]
            assert await listed_within(source, "none/") == []
            assert await listed_within(source) == []
            assert await consumed(source.list(await source.resolve())) == len(paths)

    async def test_every_page_of_a_long_listing_is_read(self, bucket: Bucket) -> None:
        names = {f"a b+%{number:04}.txt" for number in range(self.keys_of_several_pages)}
        bucket.fill({f"m/{name}": b"x" for name in names} | {"m-other": b"x"})
        async with bucket.open("m") as source:
            assert set(await listed(source)) == names
