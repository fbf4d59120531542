"""The authority on what a source contains: paths, canonical form, names, and what is no manifest."""

import json

import pytest

from bdn.core.chunk import (
    EMPTY,
    PATH_LIMIT,
    SEGMENT_LIMIT,
    FileEntry,
    MalformedDocumentError,
    Manifest,
    UnsafePathError,
    digest_of,
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


A, B = named("a"), named("b")
MANIFEST = Manifest.of([FileEntry("b/config.json", 2, B), FileEntry("a.bin", 1, A), FileEntry("b.bin", 1, A)])


def test_the_canonical_form_is_json_with_sorted_keys_and_paths_and_no_white_space() -> None:
    assert MANIFEST.canonical.decode() == (
        f'{{"files":[{{"digest":"{A}","path":"a.bin","size":1}},{{"digest":"{A}","path":"b.bin","size":1}},'
        f'{{"digest":"{B}","path":"b/config.json","size":2}}],"schema":"bdn.manifest.v1"}}'
    )
    assert MANIFEST.digest == digest_of(MANIFEST.canonical)
    assert "тест/模型".encode() in Manifest.of([FileEntry("тест/模型", 1, A)]).canonical


def test_paths_are_sorted_by_their_utf8_bytes_not_by_locale_or_folder() -> None:
    paths = ["a/b", "a-b", "A", "z", "é", "\U0001f600", "\uffff"]
    assert [entry.path for entry in Manifest.of(FileEntry(path, 1, A) for path in paths).files] == [
        "A", "a-b", "a/b", "z", "é", "\uffff", "\U0001f600",
    ]  # fmt: skip


@pytest.mark.parametrize("count", [999, 1000, 1001, 2001])
def test_a_manifest_of_any_length_is_one_document(count: int) -> None:
    manifest = Manifest.of(FileEntry(f"f/{number}", 1, A) for number in range(count))
    whole = documented([{"digest": str(A), "path": entry.path, "size": 1} for entry in manifest.files])
    assert manifest.canonical == whole
    assert Manifest.parse(whole) == manifest


@pytest.mark.parametrize(("paths", "problem"), [
    ([], "at least one file"), (["b", "a"], "sorted by path"), (["a", "a"], "is listed twice"),
    (["a", "a/b"], "both a file and a folder"),
])  # fmt: skip
def test_what_is_no_sorted_tree_is_no_manifest(paths: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Manifest(tuple(FileEntry(path, 1, A) for path in paths))


@pytest.mark.parametrize("path", ["a//b", "./a", "/a", "a/../b", "", "a\\b"])
def test_an_entry_holds_a_normalised_path(path: str) -> None:
    with pytest.raises(UnsafePathError):
        FileEntry(path, 1, A)


@pytest.mark.parametrize(("size", "digest"), [(0, A), (1, EMPTY), (-1, A), (-1, EMPTY)])
def test_an_entrys_size_fits_its_digest(size: int, digest: object) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        FileEntry("a", size, digest)  # type: ignore[arg-type]


def document(**changes: object) -> bytes:
    """The manifest of one file as JSON, with changed members of its record."""
    return documented([{"digest": str(A), "path": "a", "size": 1} | changes])


def documented(files: object) -> bytes:
    return json.dumps({"files": files, "schema": "bdn.manifest.v1"}, separators=(",", ":"), sort_keys=True).encode()


@pytest.mark.parametrize("content", [
    *(document(size=size) for size in (True, 1.0, "1", None, -1, 0)),
    *(document(path=path) for path in (1, None, "", "../a", "\ud800")),
    *(document(digest=digest) for digest in (A.hex, 5, str(EMPTY))),
    *map(documented, ([], {}, "abc", [["a"]], [{}])), document(mode=420),
    b"", b"null", b"[]", b'"files"', b"{}", b"\xff\xfe", b"[" * 100_000, b'{"files":[{"size":' + b"9" * 5000 + b"}]}",
], ids=lambda content: repr(content[-90:]))  # fmt: skip
def test_anything_else_is_no_manifest(content: bytes) -> None:
    assert Manifest.parse(document()).files == (FileEntry("a", 1, A),)  # otherwise this would prove nothing
    with pytest.raises(MalformedDocumentError, match="not a manifest"):
        Manifest.parse(content)


CANONICAL = MANIFEST.canonical
FIRST, SECOND, _ = json.loads(CANONICAL)["files"]


@pytest.mark.parametrize(("what", "content"), [
    ("a space", CANONICAL.replace(b",", b", ", 1)),
    ("a final newline", CANONICAL + b"\n"),
    ("a byte order mark", b"\xef\xbb\xbf" + CANONICAL),
    ("an escaped letter", CANONICAL.replace(b"a.bin", b"\\u0061.bin")),
    ("another schema", CANONICAL.replace(b"manifest.v1", b"manifest.v2")),
    ("no schema", CANONICAL.replace(b',"schema":"bdn.manifest.v1"', b"")),
    ("an unknown key", CANONICAL.replace(b'"schema"', b'"extra":1,"schema"')),
    ("a key twice", CANONICAL.replace(b'"size":2', b'"size":3,"size":2')),
    ("keys in another order", b'{"schema":"bdn.manifest.v1",' + CANONICAL[1:].replace(b',"schema":"bdn.manifest.v1"', b"")),
    ("files in another order", documented([SECOND, FIRST])),
    ("a size written as -0", CANONICAL.replace(b'"size":1', b'"size":-0', 1)),
])  # fmt: skip
def test_the_same_tree_written_differently_is_refused_because_its_name_would_differ(what: str, content: bytes) -> None:
    assert content != CANONICAL, what
    with pytest.raises(MalformedDocumentError):
        Manifest.parse(content)
