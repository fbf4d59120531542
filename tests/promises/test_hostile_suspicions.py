"""Readers who say of every chunk that it came wrong: each is answered, and nobody else waits for them."""

import asyncio
from pathlib import Path
from typing import Final

import httpx2
import pytest

from bdn.core.digest import Digest, digest_of
from bdn.mirror import served_chunks as shelf
from bdn.mirror.damages import Damages
from bdn.wire.http_fields import SUSPECT_HEADER
from tests.doubles.hub import Hub
from tests.support.agent.rig import MIB, noise
from tests.support.mirror.service import mirror_under_test, source
from tests.support.promises.tally import Scale, Tally

pytestmark = pytest.mark.promise("hostile-input")
pytest_plugins = ("tests.support.mirror.fixtures",)

LONGEST_SECONDS: Final = 60.0
WHOLE: Final = noise(2 * MIB, 1)  # a chunk of its own
FILES: Final = {"w.bin": WHOLE, "config.json": b"{}", "other.json": b"[]"}
SUSPECT: Final = {SUSPECT_HEADER: "1"}


@pytest.fixture
def model(upstreams: None, hub: Hub) -> None:
    hub.repo("org/model").commit(FILES)


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[Digest]:
    """What was read in the store because somebody suspected it."""
    digests: list[Digest] = []
    examine = Damages._examine

    async def noting(self: Damages, digest: Digest) -> str | None:
        digests.append(digest)
        return await examine(self, digest)

    monkeypatch.setattr(Damages, "_examine", noting)
    return digests


@pytest.mark.usefixtures("model")
async def test_many_who_suspect_at_once_are_answered_as_one_is(
    tmp_path: Path, tally: Tally, scale: Scale, examined: list[Digest]
) -> None:
    """More than the loop has threads: what each of them waits for needs such a thread, too."""
    count = scale.of(40, 200)
    names = [digest_of(content) for content in (WHOLE, b"{}", b"nobody has this")]
    async with asyncio.timeout(LONGEST_SECONDS), mirror_under_test(tmp_path / "mirror") as mirror:
        document = await mirror.ready(source("hf://org/model"))
        for name in names:
            alone = await mirror.http.head(f"/chunks/{name}", headers=SUSPECT)
            asked = [mirror.http.head(f"/chunks/{name}", headers=SUSPECT) for _ in range(count)]
            *answers, beside = await asyncio.gather(*asked, mirror.http.get("/readyz"))
            tally.add(scenarios=count, refused=count if alone.status_code == 404 else 0)
            expected = (alone.status_code, alone.headers)
            tally.add(wrong=sum((one.status_code, one.headers) != expected for one in answers))
            assert alone.status_code == (404 if name is names[-1] else 200)
            assert beside.status_code == 200
            assert examined.count(name) < count / 4  # once for the one, and twice for all who come together
        suspected = await mirror.http.get(f"/chunks/{names[0]}", headers=SUSPECT)
        assert suspected.content == WHOLE
        assert await mirror.tree(document["sources"][0]["manifest"]) == FILES


@pytest.mark.usefixtures("model")
async def test_who_suspects_what_is_no_object_of_the_store_waits_for_no_writer(tmp_path: Path, tally: Tally) -> None:
    async with asyncio.timeout(LONGEST_SECONDS), mirror_under_test(tmp_path / "mirror") as mirror:
        await mirror.ready(source("hf://org/model"))
        async with mirror.service.requests.database.write():
            in_a_slab = await mirror.http.get(f"/chunks/{digest_of(b'{}')}", headers=SUSPECT)
            nowhere = await mirror.http.get(f"/chunks/{digest_of(b'nobody has this')}", headers=SUSPECT)
    assert in_a_slab.content == b"{}"
    assert nowhere.status_code == 404
    tally.add(scenarios=2, refused=1)


@pytest.mark.usefixtures("model")
async def test_an_examination_that_takes_too_long_is_a_chunk_that_cannot_be_had_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    disk_answers = asyncio.Event()
    examine = Damages.examine

    async def slowly(*given: object) -> str | None:
        await disk_answers.wait()
        return await examine(*given)  # type: ignore[arg-type] # as it was called

    monkeypatch.setattr(Damages, "examine", slowly)
    async with asyncio.timeout(LONGEST_SECONDS), mirror_under_test(tmp_path / "mirror", serve=True) as mirror:
        await mirror.ready(source("hf://org/model"))
        plane = f"http://127.0.0.1:{mirror.service.data_port}"
        async with httpx2.AsyncClient(base_url=plane, trust_env=False, timeout=LONGEST_SECONDS) as http:
            with monkeypatch.context() as patched:
                patched.setattr(shelf, "_ANSWER_SECONDS", 0.1)
                refusal = await http.get(f"/chunks/{digest_of(WHOLE)}", headers=SUSPECT)
            disk_answers.set()
            answer = await http.get(f"/chunks/{digest_of(WHOLE)}", headers=SUSPECT)
    error = refusal.json()["error"]
    tally.add(scenarios=1, faults=1, refused=1, wrong=answer.content != WHOLE)
    assert (refusal.status_code, error["code"], error["retryable"]) == (503, "STORE_UNAVAILABLE", True)
