"""``/manifests`` and ``/chunks``: what is held and the bytes themselves. Agents prefer the data plane for chunks."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Final

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from bdn.core.chunk import Digest, digest_in
from bdn.core.errors import NotFoundError
from bdn.core.store import manifest_fault, split_digests
from bdn.mirror.access import Access
from bdn.mirror.api.parameters import Controller, Organisation
from bdn.mirror.db import agents, contents, mirrors
from bdn.mirror.db.database import Database
from bdn.mirror.served_chunks import StoreShelf
from bdn.net.api_server import Bearer, new_router, provided
from bdn.net.chunk_server.served_chunks import ChunkRequest
from bdn.wire.access_schema import Role
from bdn.wire.http_fields import (
    MEDIA_CHUNK,
    MEDIA_JSON,
    SUSPECT_HEADER,
    UnsatisfiableRangeError,
    format_content_range,
    parse_range,
)
from bdn.wire.layout_form import LayoutBody, write_file, write_layout
from bdn.wire.mirror_schema import HeldManifest, HeldManifests, Holding

_PIECE = 1024 * 1024  # bytes given to uvicorn at once; its default of 64 KiB costs half of the rate


class _ChunkAnswer(StreamingResponse):
    """What the OpenAPI document says of a chunk's bytes."""

    media_type = MEDIA_CHUNK


_CHUNK: Final[dict[str, Any]] = {
    "response_class": _ChunkAnswer,
    "responses": {
        206: {"description": "The range that was asked for", "content": {MEDIA_CHUNK: {}}},
        416: {"description": "The range begins past the end"},
    },
}


@dataclass(frozen=True)
class ContentsService:
    """What the routes need."""

    database: Database
    access: Access
    shelf: StoreShelf
    data_port: int | None


_Service = Annotated[ContentsService, provided(ContentsService)]

router = new_router("contents")


@router.get("/manifests", summary="What is held where")
async def held(service: _Service, caller: Controller) -> HeldManifests:
    """Every manifest of the organisation that some tier holds."""
    async with service.database.read() as session:
        sources = await mirrors.sources_by_manifest(session, caller.organisation)
        readable = await mirrors.readable(session, caller.organisation, list(sources))
        published = {
            digest: (files, size) for digest, files, size, _ in await contents.manifests(session) if digest in readable
        }
        rows = await agents.all_agents(session)
    nodes: dict[str, dict[str, Holding]] = {}
    for row in rows:
        for holding in map(Holding.model_validate, row.holdings):
            nodes.setdefault(holding.manifest.removeprefix("b3:"), {})[f"{row.cluster}/{row.node}"] = holding
    found = HeldManifests(
        items=[
            HeldManifest(
                manifest=f"b3:{digest}",
                sources=names,
                files_total=published[digest][0] if digest in published else None,
                bytes_total=published[digest][1] if digest in published else None,
                mirror=digest in published,
                nodes=nodes.get(digest, {}),
            )
            for digest, names in sources.items()
            if digest in published or digest in nodes
        ]
    )
    return found if caller.role is Role.OPERATOR else found.without_holders()


@router.get("/manifests/{digest}", summary="The canonical manifest")
async def manifest(service: _Service, digest: str, bearer: Bearer, organisation: Organisation = None) -> Response:
    name = digest_in(digest)
    await service.access.check_manifest(bearer, name, organisation)
    async with service.database.write() as session:
        row = await contents.manifest(session, name.hex)
        await contents.touch(session, [name.hex], time.time())
    if row is None:
        raise NotFoundError(f"manifest {name}")
    if fault := await asyncio.to_thread(manifest_fault, name, row.canonical):
        with service.shelf.damages.records_noted():
            raise contents.Record("manifest", name).damaged(fault)
    return Response(row.canonical, media_type=MEDIA_JSON, headers={"ETag": f'"{name}"'})


@router.get("/manifests/{digest}/layout", response_model=LayoutBody, summary="Where the manifest's bytes lie")
async def layout(service: _Service, digest: str, bearer: Bearer, organisation: Organisation = None) -> Response:
    name = digest_in(digest)
    owner = await service.access.check_manifest(bearer, name, organisation)
    async with service.database.read() as session:
        with service.shelf.damages.records_noted():
            found = await contents.layouts(session, name.hex, owner)
    if not found:
        raise NotFoundError(f"manifest {name}")
    # In a thread: a million files are 300 MB of JSON.
    document = await asyncio.to_thread(layout_document, name, service.data_port, found)
    return Response(document, media_type=MEDIA_JSON)


@router.get("/chunks/{digest}", summary="A chunk's bytes, or a range of them", **_CHUNK)
@router.head("/chunks/{digest}", summary="A chunk's size", **_CHUNK)
async def chunk(service: _Service, digest: str, request: Request, bearer: Bearer) -> Response:
    name = digest_in(digest)
    await service.access.check_chunk(bearer, name)
    asked = ChunkRequest(name, bearer, is_suspect=SUSPECT_HEADER.lower() in request.headers)
    opened = await service.shelf.opened(asked)
    headers = {"ETag": f'"{name}"', "Accept-Ranges": "bytes"}
    try:
        part = parse_range(request.headers.get("range"), opened.size)
    except UnsatisfiableRangeError:
        opened.file.close()
        return Response(status_code=416, headers={"Content-Range": f"bytes */{opened.size}"})
    start, size = (part.start, part.size) if part else (0, opened.size)
    headers["Content-Length"] = str(size)
    if part is not None:
        headers["Content-Range"] = format_content_range(part, opened.size)
    status = 200 if part is None else 206
    if request.method == "HEAD":
        opened.file.close()
        return Response(status_code=status, headers=headers, media_type=MEDIA_CHUNK)
    return _ChunkAnswer(_pieces(opened.file, opened.offset + start, size), status, headers)


async def _pieces(file: BinaryIO, start: int, size: int) -> AsyncIterator[bytes]:
    with file:
        file.seek(start)
        while size and (piece := await asyncio.to_thread(file.read, min(size, _PIECE))):
            size -= len(piece)
            yield piece


def layout_document(manifest: Digest, data_port: int | None, files: Iterable[contents.ContentLayout]) -> str:
    """The JSON of a ``LayoutBody``."""
    return write_layout(manifest, data_port, map(_file, files))


def _file(one: contents.ContentLayout) -> str:
    if one.slab is None:
        return write_file(one.digest, one.size, [chunk.hex() for chunk in split_digests(one.chunks)])
    return write_file(one.digest, one.size, [one.digest], (one.slab, one.slab_size, one.offset))
