"""The authority on what a source contains: canonical form, names, and what is no manifest."""

import json

import pytest

from bdn.core.chunk import EMPTY, digest_of
from bdn.core.manifest import FileEntry, MalformedDocumentError, Manifest
from bdn.core.source.listing import UnsafePathError
from tests.support.content.names import named

A, B = named("a"), named("b")
MANIFEST = Manifest.of([FileEntry("b/config.json", 2, B), FileEntry("a.bin", 1, A), FileEntry("b.bin", 1, A)])


def test_the_canonical_form_is_json_with_sorted_keys_and_paths_and_no_white_space() -> None:
    assert MANIFEST.canonical.decode() == (
        f'{{"files":[{{"digest":"{A}","path":"a.bin","size":1}},{{"digest":"{A}","path":"b.bin","size":1}},'
        f'{{"digest":"{B}","path":"b/config.json","size":2}}],"schema":"bdn.manifest.v1"}}'
    )


def test_a_manifest_is_named_by_its_canonical_bytes() -> None:
    assert MANIFEST.digest == digest_of(MANIFEST.canonical)


def test_paths_are_sorted_by_their_utf8_bytes_not_by_locale_or_folder() -> None:
    paths = ["a/b", "a-b", "A", "z", "é", "\U0001f600", "\uffff"]
    assert [entry.path for entry in Manifest.of(FileEntry(path, 1, A) for path in paths).files] == [
        "A", "a-b", "a/b", "z", "é", "\uffff", "\U0001f600",
    ]  # fmt: skip


def test_unicode_is_written_as_itself() -> None:
    assert "тест/模型".encode() in Manifest.of([FileEntry("тест/模型", 1, A)]).canonical


@pytest.mark.parametrize("count", [999, 1000, 1001, 2001])
def test_a_manifest_of_any_length_is_one_document(count: int) -> None:
    manifest = Manifest.of(FileEntry(f"f/{number}", 1, A) for number in range(count))
    files = [{"digest": str(A), "path": entry.path, "size": 1} for entry in manifest.files]
    whole = json.dumps({"files": files, "schema": "bdn.manifest.v1"}, separators=(",", ":")).encode()
    assert manifest.canonical == whole
    assert Manifest.parse(whole) == manifest


def test_a_manifest_without_files_does_not_exist() -> None:
    with pytest.raises(ValueError, match="at least one file"):
        Manifest(())


def test_files_out_of_order_do_not_make_a_manifest() -> None:
    with pytest.raises(ValueError, match="sorted by path"):
        Manifest((FileEntry("b", 1, A), FileEntry("a", 1, A)))


@pytest.mark.parametrize("paths", [["a", "a"], ["a", "a/b"]])
def test_paths_that_make_no_tree_make_no_manifest(paths: list[str]) -> None:
    with pytest.raises(UnsafePathError):
        Manifest.of(FileEntry(path, 1, A) for path in paths)


@pytest.mark.parametrize("path", ["a//b", "./a", "/a", "a/../b", "", "a\\b"])
def test_an_entry_holds_a_normalised_path(path: str) -> None:
    with pytest.raises(UnsafePathError):
        FileEntry(path, 1, A)


@pytest.mark.parametrize(("size", "digest"), [(0, A), (1, EMPTY), (-1, A), (-1, EMPTY)])
def test_an_entrys_size_fits_its_digest(size: int, digest: object) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        FileEntry("a", size, digest)  # type: ignore[arg-type]


def test_an_empty_file_has_the_digest_of_nothing() -> None:
    assert Manifest.of([FileEntry("empty", 0, EMPTY)]).bytes_total == 0


def changed(**changes: object) -> bytes:
    """The manifest of one file as JSON, with changed members of its file record."""
    record = {"digest": str(A), "path": "a", "size": 1} | changes
    return json.dumps({"files": [record], "schema": "bdn.manifest.v1"}, separators=(",", ":"), sort_keys=True).encode()


def test_the_unchanged_record_is_a_manifest() -> None:
    """Otherwise the refusals below would prove nothing."""
    assert Manifest.parse(changed()).files == (FileEntry("a", 1, A),)


@pytest.mark.parametrize(
    "changes",
    [
        *({"size": size} for size in (True, 1.0, "1", None, -1, 0)),
        *({"path": path} for path in (1, None, "", "../a", "\ud800")),
        *({"digest": digest} for digest in (A.hex, 5, str(EMPTY))),
        {"mode": 420},
    ],
    ids=repr,
)
def test_a_wrong_member_of_a_record_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(MalformedDocumentError, match="not a manifest"):
        Manifest.parse(changed(**changes))


@pytest.mark.parametrize(
    "document",
    [
        b"", b"null", b"[]", b'"files"', b"{}", b'{"files":[],"schema":"bdn.manifest.v1"}',
        b'{"files":{},"schema":"bdn.manifest.v1"}', b'{"files":"abc","schema":"bdn.manifest.v1"}',
        b'{"files":[["a"]],"schema":"bdn.manifest.v1"}', b'{"files":[{}],"schema":"bdn.manifest.v1"}', b"\xff\xfe",
        b"[" * 100_000, b'{"files":[{"size":' + b"9" * 5000 + b"}]}",
    ],
    ids=lambda document: repr(document[:40]),
)  # fmt: skip
def test_anything_else_is_no_manifest(document: bytes) -> None:
    with pytest.raises(MalformedDocumentError, match="not a manifest"):
        Manifest.parse(document)


CANONICAL = MANIFEST.canonical
FIRST, SECOND, _ = json.loads(CANONICAL)["files"]


@pytest.mark.parametrize(("what", "document"), [
    ("a space", CANONICAL.replace(b",", b", ", 1)),
    ("a final newline", CANONICAL + b"\n"),
    ("a byte order mark", b"\xef\xbb\xbf" + CANONICAL),
    ("an escaped letter", CANONICAL.replace(b"a.bin", b"\\u0061.bin")),
    ("another schema", CANONICAL.replace(b"manifest.v1", b"manifest.v2")),
    ("no schema", CANONICAL.replace(b',"schema":"bdn.manifest.v1"', b"")),
    ("an unknown key", CANONICAL.replace(b'"schema"', b'"extra":1,"schema"')),
    ("a key twice", CANONICAL.replace(b'"size":2', b'"size":3,"size":2')),
    ("keys in another order", b'{"schema":"bdn.manifest.v1",' + CANONICAL[1:].replace(b',"schema":"bdn.manifest.v1"', b"")),
    ("files in another order", json.dumps({"files": [SECOND, FIRST], "schema": "bdn.manifest.v1"}, separators=(",", ":")).encode()),
    ("a size written as -0", CANONICAL.replace(b'"size":1', b'"size":-0', 1)),
])  # fmt: skip
def test_the_same_tree_written_differently_is_refused_because_its_name_would_differ(what: str, document: bytes) -> None:
    assert document != CANONICAL, what
    with pytest.raises(MalformedDocumentError):
        Manifest.parse(document)
