"""Which listed paths may become files, and which trees may exist."""

import pytest

from bdn.core.source.listing import PATH_LIMIT, SEGMENT_LIMIT, UnsafePathError, check_tree, normalise_path


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


def test_a_path_that_stands_twice_makes_no_tree() -> None:
    with pytest.raises(UnsafePathError, match="'a/b' stands twice"):
        check_tree(["a/b", "c", "a/b"])


@pytest.mark.parametrize("paths", [["a", "a/b"], ["a/b", "a"], ["a/b/c/d", "x", "a/b"], ["a/b/c", "a/b/d", "a"]])
def test_a_file_that_is_also_a_folder_makes_no_tree(paths: list[str]) -> None:
    with pytest.raises(UnsafePathError, match="both a file and a folder"):
        check_tree(paths)
