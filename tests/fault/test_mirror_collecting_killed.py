"""The real ``bdn serve``, killed while it collects, again and again, beside clients that mirror: nothing READY is lost."""

import asyncio
import signal
from pathlib import Path
from random import Random

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import Digest, digest_of
from tests.doubles.content import GeneratedContent
from tests.doubles.hub import Hub
from tests.support.mirror.process import ServingProcess
from tests.support.mirror.service import source
from tests.support.promises.tally import Scale, Tally

pytest_plugins = ("tests.support.mirror.fixtures",)

# All begin with the same chunks, and share a small file.
_AT_ONCE = {"BDN_TOMBSTONE_SECONDS": "0", "BDN_COLLECT_GRACE_SECONDS": "0"}
MODELS = {f"org/m{number}": GeneratedContent(CHUNK_SIZE + 10 + number) for number in range(3)}


@pytest.mark.promise("collection")
async def test_a_mirror_that_is_killed_while_it_collects_loses_nothing_that_it_said_was_ready(
    upstreams: None, hub: Hub, tmp_path: Path, tally: Tally, scale: Scale
) -> None:
    for name, content in MODELS.items():
        hub.repo(name).commit({"model.bin": content, "shared.txt": b"shared", f"{name[-2:]}.txt": name.encode()})
    seed = 20261122
    random = Random(seed)
    for life in range(scale.of(2, 15)):
        async with await ServingProcess.start(tmp_path, **_AT_ONCE) as mirror:
            # What the life before left is whole.
            for document in (await mirror.http.get("/mirror", params={"status": "READY"})).json()["items"]:
                if document["grant"] is not None:
                    tally.add(lost=await lost(mirror, document["sources"][0]["manifest"]))
            clients = [asyncio.create_task(mirrors_and_evicts(mirror, name)) for name in MODELS]
            collecting = asyncio.create_task(collects(mirror))
            await asyncio.sleep(random.uniform(0.1, 1.0))
            assert await mirror.end(signal.SIGKILL) == -signal.SIGKILL
            results = await asyncio.gather(*clients, collecting, return_exceptions=True)
            assert not [error for error in results if isinstance(error, AssertionError)], (seed, life, results)
        tally.add(scenarios=1, kills=1)
    async with await ServingProcess.start(tmp_path, **_AT_ONCE) as mirror:
        for name in MODELS:
            done = await mirror.ended(await mirror.begin(source(f"hf://{name}")))
            assert done["status"] == "READY", done
            tally.add(lost=await lost(mirror, done["sources"][0]["manifest"]))
        await mirror.http.post("/evictions", json={"all": True, "tier": "mirror"})
        # Chunks of the last minute wait until no mirror that began meanwhile runs; none does.
        await collected(mirror)
        left = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
        assert left == []


async def mirrors_and_evicts(mirror: ServingProcess, name: str) -> None:
    """Until the mirror dies: what it says is READY can be read, or was evicted by us."""
    while True:
        done = await mirror.ended(await mirror.begin(source(f"hf://{name}")))
        assert done["status"] == "READY", done
        assert await lost(mirror, done["sources"][0]["manifest"]) == 0
        await mirror.http.post("/evictions", json={"source": f"hf://{name}", "tier": "mirror"})


async def collects(mirror: ServingProcess) -> None:
    while True:
        await collected(mirror)


async def collected(mirror: ServingProcess) -> None:
    asked = (await mirror.http.post("/collections", json={})).json()
    done = (await mirror.http.get(f"/collections/{asked['id']}", params={"wait": 30})).json()
    assert done["status"] == "DONE", done


async def lost(mirror: ServingProcess, manifest: str) -> int:
    """How many objects of the manifest cannot be read, or are not what their names say."""
    layout = (await mirror.http.get(f"/manifests/{manifest}/layout")).json()
    missing = 0
    for file in layout["files"]:
        for name in [file["slab"]["digest"]] if "slab" in file else file["chunks"]:
            answer = await mirror.http.get(f"/chunks/{name}")
            missing += answer.status_code != 200 or digest_of(answer.content) != Digest.parse(name)
    return missing
