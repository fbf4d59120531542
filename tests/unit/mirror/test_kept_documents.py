"""Documents of manifests that are read for files: kept up to a weight, and read once for all who wait."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from bdn.mirror.serving.served_files import Documents
from tests.support.content.names import named


async def test_the_document_that_was_used_least_recently_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bdn.mirror.serving.served_files._KEPT", 10)
    documents, read = Documents[str](), list[str]()
    with ThreadPoolExecutor(1) as threads:

        async def get(name: str, weight: int = 4) -> str:
            def load() -> tuple[str, int]:
                read.append(name)
                return name.upper(), weight

            return await documents.get(named(name), "o", load, threads)

        assert [await get(name) for name in "abacabd"] == ["A", "B", "A", "C", "A", "B", "D"]
        assert read == ["a", "b", "c", "b", "d"]  # c replaced b, b replaced c, and d replaced a
        await get("larger than all", 11)
        assert await asyncio.gather(*(get(name) for name in "bb")) == ["B", "B"]
        assert read[5:] == ["larger than all", "b"]
