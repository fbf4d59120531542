import json

import pytest

from bdn.core.chunk import CHUNK_SIZE, EMPTY, digest_of
from bdn.core.store import FileLayout, Slab
from bdn.mirror.api.contents import layout_document
from bdn.mirror.db.contents import ContentLayout
from bdn.wire.mirror_schema import FileLayoutBody, LayoutBody

MANIFEST = digest_of(b"manifest")
CHUNKS = (digest_of(b"one"), digest_of(b"two"))
SLAB = Slab(digest_of(b"slab"), 1000, "public")
LAYOUTS = [
    FileLayout.of(CHUNK_SIZE + 1, CHUNKS),
    FileLayout.of(0, ()),
    FileLayout.packed(digest_of(b"small"), 5, SLAB, 995),
]
ROWS = [
    ContentLayout(LAYOUTS[0].digest.hex, LAYOUTS[0].size, b"".join(chunk.to_bytes() for chunk in CHUNKS)),
    ContentLayout(EMPTY.hex, 0, b""),
    ContentLayout(digest_of(b"small").hex, 5, b"", SLAB.digest.hex, SLAB.size, 995),
]


@pytest.mark.parametrize("port", [None, 8461])
def test_the_document_is_what_the_schema_would_write(port: int | None) -> None:
    body = LayoutBody(manifest=str(MANIFEST), data_port=port, files=[FileLayoutBody.of(one) for one in LAYOUTS])
    assert layout_document(MANIFEST, port, ROWS) == body.to_json()


def test_it_reads_back_as_the_layouts_that_it_was_made_of() -> None:
    body = LayoutBody.model_validate_json(layout_document(MANIFEST, None, ROWS))
    assert [file.to_core() for file in body.files] == LAYOUTS


def test_a_file_of_its_own_says_nothing_of_slabs() -> None:
    files = json.loads(layout_document(MANIFEST, None, ROWS))["files"]
    assert ["slab" in file for file in files] == [False, False, True]
    assert files[2]["chunks"] == [str(digest_of(b"small"))]  # for who knows nothing of slabs


@pytest.mark.parametrize(
    "slab", [{"digest": "b3:no", "size": 9, "offset": 0}, {"digest": str(SLAB.digest), "size": 4, "offset": 0}]
)
def test_a_slab_that_cannot_be_is_refused(slab: dict[str, object]) -> None:
    small = str(digest_of(b"small"))
    body = FileLayoutBody.model_validate({"digest": small, "size": 5, "chunks": [small], "slab": slab})
    with pytest.raises(ValueError, match=r"not a digest|cannot hold"):
        body.to_core()


def test_a_layout_without_slabs_is_read_as_before() -> None:
    small = str(digest_of(b"small"))
    for absent in ({}, {"slab": None}):
        body = FileLayoutBody.model_validate({"digest": small, "size": 5, "chunks": [small], **absent})
        assert body.to_core() == FileLayout.of(5, (digest_of(b"small"),))
