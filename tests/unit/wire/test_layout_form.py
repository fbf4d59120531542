"""A layout's document, read and written without models, is the one that the API describes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.chunk import CHUNK_SIZE, FileLayout, MalformedDocumentError, Slab, chunk_count, digest_of
from bdn.wire.layout_form import Layout, LayoutBody
from bdn.wire.location_schema import Delivery
from tests.support.content.names import named

SLAB = Slab(named("slab"), 4096, "public")
MANIFEST = named("manifest")
LARGE = FileLayout.of(CHUNK_SIZE + 1, (named("first"), named("second")))
PACKED = FileLayout.packed(digest_of(b"small"), 5, SLAB, 100)
LAYOUT = Layout(MANIFEST, 8461, {LARGE.digest: LARGE, PACKED.digest: PACKED})


digests = st.binary(min_size=32, max_size=32).map(digest_of)


@st.composite
def file_layouts(draw: st.DrawFn) -> FileLayout:
    if draw(st.booleans()):
        size = draw(st.integers(1, SLAB.size))
        return FileLayout.packed(draw(digests), size, SLAB, draw(st.integers(0, SLAB.size - size)))
    size = draw(st.integers(0, 4 * CHUNK_SIZE))
    count = chunk_count(size)
    return FileLayout.of(size, tuple(draw(st.lists(digests, min_size=count, max_size=count))))


@given(st.lists(file_layouts(), max_size=6), st.none() | st.integers(1, 65535), st.sampled_from(["direct", "proxy"]))
def test_what_is_written_is_read_and_has_the_form_that_the_api_describes(
    files: list[FileLayout], port: int | None, delivery: Delivery
) -> None:
    layout = Layout(MANIFEST, port, {file.digest: file for file in files}, delivery)

    assert Layout.parse(layout.encode()) == layout
    assert (
        LayoutBody.model_validate_json(layout.encode()).model_dump_json(exclude_defaults=True).encode()
        == layout.encode()
    )


def test_absent_slabs_may_be_written_as_null() -> None:
    body = LayoutBody.model_validate_json(LAYOUT.encode())
    assert Layout.parse(body.model_dump_json().encode()) == LAYOUT


def test_files_of_one_slab_share_its_name_in_memory() -> None:
    files = [FileLayout.packed(named(word), 5, SLAB, 0) for word in ("one", "other")]
    layout = Layout.parse(Layout(MANIFEST, None, {file.digest: file for file in files}).encode())

    one, other = (file.slice for file in layout.files.values())
    assert one is not None
    assert other is not None
    assert one.slab is other.slab


WRONG: dict[str, dict[str, Any]] = {
    "a port that is text": {"data_port": "8461"},
    "a port that is true": {"data_port": True},
    "no port": {},
    "a manifest that is no digest": {"manifest": "b3:0"},
    "a manifest that is a number": {"manifest": 3},
    "files that are a number": {"files": 3},
    "a file that is text": {"files": ["file"]},
    "a slice among the files": {"files": [{"digest": str(SLAB.digest), "size": 1, "offset": 0}]},
}
WRONG_FILE: dict[str, dict[str, Any]] = {
    "a size that is text": {"size": "5"},
    "a size that is true": {"size": True},
    "a chunk that is a number": {"chunks": [3]},
    "chunks that are text": {"chunks": str(PACKED.digest)},
    "a slab that is text": {"slab": "slab"},
    "a slab without an offset": {"slab": {"digest": str(SLAB.digest), "size": SLAB.size}},
    "an offset that is text": {"slab": {"digest": str(SLAB.digest), "size": SLAB.size, "offset": "0"}},
    "an offset that is true": {"slab": {"digest": str(SLAB.digest), "size": SLAB.size, "offset": True}},
    "an offset beyond the slab": {"slab": {"digest": str(SLAB.digest), "size": SLAB.size, "offset": SLAB.size}},
    "an offset before the slab": {"slab": {"digest": str(SLAB.digest), "size": SLAB.size, "offset": -1}},
    "a slab larger than a chunk": {"slab": {"digest": str(SLAB.digest), "size": CHUNK_SIZE + 1, "offset": 0}},
}


@pytest.mark.parametrize("what", [*WRONG, *WRONG_FILE])
def test_a_document_that_is_no_layout_is_refused(what: str) -> None:
    document = json.loads(LAYOUT.encode())
    document |= WRONG.get(what, {})
    if what in WRONG_FILE:
        document["files"][1] |= WRONG_FILE[what]
    elif what == "no port":
        del document["data_port"]
    with pytest.raises(MalformedDocumentError, match="not a layout"):
        Layout.parse(json.dumps(document).encode())


def test_a_document_that_nests_without_end_is_refused() -> None:
    with pytest.raises(MalformedDocumentError):
        Layout.parse(b"[" * 100_000)
