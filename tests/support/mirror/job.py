"""A job as the mirror sees it: somebody who pushes checkpoints."""

import asyncio
from itertools import chain
from typing import Any, Final

import httpx2

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.manifest import is_small, slab_cutter
from tests.support.mirror.service import Json, MirrorUnderTest

STEP: Final = "bt://llama@job1/checkpoint-100"


def cut(content: bytes) -> list[bytes]:
    return [content[start : start + CHUNK_SIZE] for start in range(0, len(content), CHUNK_SIZE)]


def slabs_of(tree: dict[str, bytes]) -> list[list[str]]:
    """The paths in each slab."""
    cutter, small = slab_cutter(), sorted(path for path, content in tree.items() if is_small(len(content)))
    return [*chain.from_iterable(cutter.add(path, path, len(tree[path])) for path in small), *cutter.finish()]


def chunks_of(tree: dict[str, bytes]) -> dict[str, bytes]:
    large = [chunk for content in tree.values() if not is_small(len(content)) for chunk in cut(content)]
    slabs = [b"".join(tree[path] for path in paths) for paths in slabs_of(tree)]
    return {str(digest_of(chunk)): chunk for chunk in [*large, *slabs]}


def files_of(tree: dict[str, bytes]) -> list[Json]:
    files: list[Json] = [
        {"path": path, "size": len(content), "chunks": [str(digest_of(chunk)) for chunk in cut(content)]}
        for path, content in tree.items()
        if not is_small(len(content))
    ]
    for paths in slabs_of(tree):
        slab, offset = str(digest_of(b"".join(tree[path] for path in paths))), 0
        for path in paths:
            size, digest = len(tree[path]), str(digest_of(tree[path]))
            files.append({"path": path, "size": size, "digest": digest, "slab": slab, "offset": offset})
            offset += size
    return files


class Job:
    """Somebody who pushes to a mirror, with a token or as anybody."""

    def __init__(self, mirror: MirrorUnderTest, bearer: str | None = None) -> None:
        self.mirror = mirror
        self.headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        plane = f"http://127.0.0.1:{mirror.service.data_port}"
        self.plane = httpx2.AsyncClient(base_url=plane, headers=self.headers, timeout=60)

    async def ask(self, method: str, path: str, **body: Any) -> httpx2.Response:
        return await self.mirror.http.request(method, path, headers=self.headers, json=body or None)

    async def begin(self, uri: str = STEP) -> str:
        answer = await self.ask("POST", "/pushes", source=uri)
        assert answer.status_code == 201, answer.text
        assert answer.json()["data_port"] == self.mirror.service.data_port
        return str(answer.json()["push_id"])

    async def missing(self, push: str, chunks: list[str]) -> list[str]:
        answer = await self.ask("POST", f"/pushes/{push}/missing", chunks=chunks)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["chunks"])

    async def put(self, push: str, name: str, content: bytes) -> httpx2.Response:
        return await self.plane.put(f"/pushes/{push}/chunks/{name}", content=content)

    async def send(self, push: str, tree: dict[str, bytes]) -> int:
        """What is missing; how many bytes that were."""
        chunks = chunks_of(tree)
        missing = await self.missing(push, list(chunks))
        answers = await asyncio.gather(*[self.put(push, name, chunks[name]) for name in missing])
        assert {answer.status_code for answer in answers} <= {204}, [answer.text for answer in answers]
        return sum(len(chunks[name]) for name in missing)

    async def commit(self, push: str, tree: dict[str, bytes], **details: Any) -> httpx2.Response:
        return await self.ask("POST", f"/pushes/{push}/commit", files=files_of(tree), details=details)

    async def push(self, tree: dict[str, bytes], uri: str = STEP, **details: Any) -> Json:
        """The mirror that it became."""
        push = await self.begin(uri)
        await self.send(push, tree)
        answer = await self.commit(push, tree, **details)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def checkpoints(self, **which: str) -> list[Json]:
        answer = await self.mirror.http.get("/checkpoints", params=which, headers=self.headers)
        return list(answer.json()["items"])
