import asyncio
import gzip
import json
from collections.abc import AsyncIterator

import pytest

from bdn.core.chunk import CHUNK_SIZE, EMPTY, FileLayout, Slab, digest_of
from bdn.mirror.db.contents import ContentLayout
from bdn.mirror.serving.layout_documents import LayoutDocument
from bdn.wire.layout_form import Layout, LayoutBody
from bdn.wire.location_schema import Delivery

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


def written(port: int | None, delivery: Delivery = "proxy") -> bytes:
    async def pages() -> AsyncIterator[list[ContentLayout]]:
        yield ROWS[:1]
        yield ROWS[1:]

    document = asyncio.run(LayoutDocument.of(MANIFEST, port, pages(), delivery))
    unpacked = b"".join(document.unpacked())
    assert (gzip.decompress(document.gzip), digest_of(unpacked)) == (unpacked, document.digest)
    return unpacked


@pytest.mark.parametrize(("port", "delivery"), [(None, "proxy"), (8461, "proxy"), (8461, "direct")])
def test_the_mirror_writes_what_agents_read(port: int | None, delivery: Delivery) -> None:
    document = written(port, delivery)
    assert Layout.parse(document) == Layout(MANIFEST, port, {one.digest: one for one in LAYOUTS}, delivery)
    assert LayoutBody.model_validate_json(document).model_dump_json(exclude_defaults=True).encode() == document


def test_a_file_of_its_own_says_nothing_of_slabs() -> None:
    files = json.loads(written(None))["files"]
    assert ["slab" in file for file in files] == [False, False, True]
    assert files[2]["chunks"] == [str(digest_of(b"small"))]  # for who knows nothing of slabs
