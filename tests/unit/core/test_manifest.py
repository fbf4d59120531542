"""Paths and entries of manifests: which are safe, and which are none."""

import pytest

from bdn.core.chunk import (
    EMPTY,
    PATH_LIMIT,
    SEGMENT_LIMIT,
    FileEntry,
    UnsafePathError,
    normalise_path,
)
from tests.support.content.names import named


@pytest.mark.parametrize(("path", "normal"), [
    *[(path, path) for path in ("config.json", "a/b/c", ".gitattributes", "...", "a/..b/c..", "with space/тест/模型", "line\nbreak", "C:/x", "é" * 127)],
    ("a//b", "a/b"),
    ("./a/./b", "a/b"),
])  # fmt: skip
def test_a_safe_path_is_relative_without_empty_or_dot_segments(path: str, normal: str) -> None:
    assert normalise_path(path) == normal


@pytest.mark.parametrize(("reason", "paths"), [
    ("names no file", ["", ".", "./.", "a/"]),
    ("absolute", ["/", "/etc/passwd", "//a"]),
    ("leaves its folder", ["..", "../a", "a/../b", "a/..", "./../a"]),
    ("NUL or a backslash", ["a\0b", "a\\b", "..\\a"]),
    ("not valid Unicode", ["a\ud800"]),
])  # fmt: skip
def test_an_unsafe_path_is_refused_with_the_reason(reason: str, paths: list[str]) -> None:
    for path in paths:
        with pytest.raises(UnsafePathError, match=reason):
            normalise_path(path)


def test_limits_count_bytes_and_include_the_limit_itself() -> None:
    assert normalise_path("x" * SEGMENT_LIMIT)
    assert normalise_path("/".join(["x" * 255] * 12))  # 3071 bytes
    for path in ("x" * (SEGMENT_LIMIT + 1), "é" * 128, "/".join(["x" * 255] * 12 + ["xx"])):
        with pytest.raises(UnsafePathError, match="too long"):
            normalise_path(path)


def test_the_limit_of_a_path_is_counted_after_normalising() -> None:
    longest = "/".join(["x" * 255] * 12) + "/"
    assert len(longest) == PATH_LIMIT
    assert normalise_path("./" * 100 + longest.removesuffix("/")) == longest.removesuffix("/")


def test_a_refused_path_is_shown_shortened_and_printable() -> None:
    with pytest.raises(UnsafePathError) as caught:
        normalise_path("/\x1b[31m" + "x" * 5000)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


A = named("a")


@pytest.mark.parametrize("path", ["a//b", "./a", "/a", "a/../b", "", "a\\b"])
def test_an_entry_holds_a_normalised_path(path: str) -> None:
    with pytest.raises(UnsafePathError):
        FileEntry(path, 1, A)


@pytest.mark.parametrize(("size", "digest"), [(0, A), (1, EMPTY), (-1, A), (-1, EMPTY)])
def test_an_entrys_size_fits_its_digest(size: int, digest: object) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        FileEntry("a", size, digest)  # type: ignore[arg-type]
