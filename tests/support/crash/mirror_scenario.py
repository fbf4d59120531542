"""What a user asks of a mirror, step by step, and what a mirror that died has to show for it."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Final, cast

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.mirror.app import MirrorService
from tests.doubles.hub import Hub
from tests.support.content.noise import MIB, noise
from tests.support.crash.scenario import Action, Scenario
from tests.support.mirror.backends import behind
from tests.support.mirror.process import ServingProcess
from tests.support.mirror.service import Json, MirrorUnderTest, source
from tests.support.network.egress import ALLOW_LOOPBACK

KEY: Final = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="


@cache
def repositories() -> dict[str, dict[str, bytes]]:
    """Files of several chunks, of one, and packed ones."""
    small = {f"{number}.json": noise(50_000, number) for number in range(9)}
    return {
        "org/one": {"weights.bin": noise(2 * CHUNK_SIZE + 100_000, 11), "one.bin": noise(MIB + 5, 12), **small},
        "org/two": {"other.bin": noise(MIB + 7, 13), **{f"two/{name}": content for name, content in small.items()}},
        "org/three": {"more.bin": noise(MIB + 9, 14), "config.json": b"{}"},
    }


def fill(hub: Hub) -> None:
    """The upstream that the mirror reads."""
    for name, files in repositories().items():
        hub.repo(name).commit(files)


class MirrorScenario(Scenario[ServingProcess]):
    """Mirrors, an eviction and a secret. ``ready`` is what the user was told is READY, by repository."""

    def __init__(self, hub: Hub, place: Path) -> None:
        self.hub, self.data_dir = hub, place / "mirror"
        self.ready: dict[str, Json] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ServingProcess]:
        environ = {"BDN_EGRESS_ALLOW": ALLOW_LOOPBACK, "HF_ENDPOINT": self.hub.url, "BDN_SECRETS_KEY": KEY}
        async with await ServingProcess.start(self.data_dir, BDN_TRANSFERS="4", **environ) as process:
            yield process

    def actions(self, program: ServingProcess) -> Sequence[Action]:
        mirror = self._client(program)
        return [
            partial(self._mirror, mirror, "org/one"),
            partial(self._mirror, mirror, "org/two"),
            partial(self._evict, mirror, "org/two"),
            partial(mirror.http.put, "/secrets/a-secret", json={"value": "of mine"}),
            partial(self._mirror, mirror, "org/three"),
            partial(self._mirror, mirror, "org/two"),
        ]

    async def _mirror(self, mirror: MirrorUnderTest, name: str) -> None:
        self.ready[name] = await mirror.ready(source(f"hf://{name}"))

    async def _evict(self, mirror: MirrorUnderTest, name: str) -> None:
        if name in self.ready:
            manifest = self.ready.pop(name)["sources"][0]["manifest"]
            await mirror.http.post("/evictions", params={"wait": 20}, json={"manifest": manifest, "tier": "mirror"})

    def _client(self, process: ServingProcess) -> MirrorUnderTest:
        return MirrorUnderTest(cast("MirrorService", None), process.http, self.data_dir)

    def wrong_files(self) -> Iterator[str]:
        """Chunks."""
        found = behind(self.data_dir)
        for name in map(Digest, (path.rpartition("/")[2] for path in found.chunks())):
            with found.chunk(name) as path:
                if digest_of(path.read_bytes()) != name:
                    yield str(path)

    async def check(self, program: ServingProcess, case: str) -> None:
        """What was READY is there, and is not copied again."""
        mirror = self._client(program)
        for name, document in self.ready.items():
            status = (await mirror.http.get(f"/mirror/{document['id']}")).json().get("status")
            assert status == "READY", f"{name}: {status}, {case}"
            assert await mirror.tree(document["sources"][0]["manifest"]) == repositories()[name], f"{name}, {case}"
            assert not (await mirror.ready(source(f"hf://{name}")))["bytes_transferred"], f"{name}, {case}"
        assert self.done <= 3 or "a-secret" in (await mirror.http.get("/secrets")).text, case

    async def check_end(self, program: ServingProcess, case: str) -> None:
        assert not list(self.wrong_files()), case
