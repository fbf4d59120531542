"""A manifest's layout as the wire's document, made for a million files."""

from __future__ import annotations

import json
from collections.abc import Iterable

from bdn.core.digest import Digest
from bdn.mirror.db.layouts import ContentLayout, split_digests


def layout_document(manifest: Digest, data_port: int | None, layouts: Iterable[ContentLayout]) -> str:
    """The JSON of a ``LayoutBody``, put together by hand: ten times as fast as a model of each file.

    Nothing in it needs escaping: there are hexadecimal digits and numbers only.
    """
    head = f'{{"manifest":"{manifest}","data_port":{json.dumps(data_port)},"files":['
    return head + ",".join(map(_file, layouts)) + "]}"


def _file(one: ContentLayout) -> str:
    head = f'{{"digest":"b3:{one.digest}","size":{one.size},"chunks":'
    if one.slab is None:
        chunks = ",".join(f'"b3:{chunk.hex()}"' for chunk in split_digests(one.chunks))
        return f"{head}[{chunks}]}}"
    slab = f'{{"digest":"b3:{one.slab}","size":{one.slab_size},"offset":{one.offset}}}'
    return f'{head}["b3:{one.digest}"],"slab":{slab}}}'
