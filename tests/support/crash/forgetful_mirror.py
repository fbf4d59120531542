"""A mirror on a disk whose power fails: what is asked of it, step by step, and what is left of it afterwards."""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import httpx2

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.mirror.app import MirrorService
from tests.doubles.hub import Hub
from tests.support.content.noise import MIB, noise
from tests.support.crash.killing_steps import is_done_before_the_end
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


@dataclass
class Central:
    """One mirror's data directory on ``place``, and the user who asks for mirrors. ``ready`` is what it was told."""

    hub: Hub
    place: Path
    ready: dict[str, Json] = field(default_factory=dict)  # by repository
    done: int = 0

    @property
    def data_dir(self) -> Path:
        return self.place / "mirror"

    async def start(self) -> ServingProcess:
        environ = {"BDN_EGRESS_ALLOW": ALLOW_LOOPBACK, "HF_ENDPOINT": self.hub.url, "BDN_SECRETS_KEY": KEY}
        return await ServingProcess.start(self.data_dir, BDN_TRANSFERS="4", **environ)

    # --- the user ---

    async def live(self, process: ServingProcess) -> None:
        """Go on with the next thing that the user wants, to the end."""
        mirror = self._client(process)
        actions: list[Callable[[], Awaitable[Any]]] = [
            lambda: self._mirror(mirror, "org/one"),
            lambda: self._mirror(mirror, "org/two"),
            lambda: self._evict(mirror, "org/two"),
            lambda: mirror.http.put("/secrets/a-secret", json={"value": "of mine"}),
            lambda: self._mirror(mirror, "org/three"),
            lambda: self._mirror(mirror, "org/two"),
        ]
        for action in actions[self.done :]:
            await action()
            self.done += 1

    async def until_killed(self, process: ServingProcess) -> bool:
        """The same, until the process has ended; whether all was done before."""
        expected = (httpx2.HTTPError, ValueError, AssertionError)
        return await is_done_before_the_end(self.live(process), process.process, *expected)

    async def _mirror(self, mirror: MirrorUnderTest, name: str) -> None:
        self.ready[name] = await mirror.ready(source(f"hf://{name}"))

    async def _evict(self, mirror: MirrorUnderTest, name: str) -> None:
        if name in self.ready:
            manifest = self.ready.pop(name)["sources"][0]["manifest"]
            await mirror.http.post("/evictions", params={"wait": 20}, json={"manifest": manifest, "tier": "mirror"})

    def _client(self, process: ServingProcess) -> MirrorUnderTest:
        return MirrorUnderTest(cast("MirrorService", None), process.http, self.data_dir)

    # --- what is left ---

    async def goes_on(self, process: ServingProcess, case: str) -> None:
        """Check that what was READY is there, and that all else can be done."""
        lost = await self.lost(process)
        assert not lost, f"{case}: {lost}"
        await self.live(process)
        assert not list(self.wrong_files()), case

    def wrong_files(self) -> Iterator[Path]:
        """Chunks under their names that are not what these say. Absent ones are none."""
        found = behind(self.data_dir)
        for name in map(Digest, (path.rpartition("/")[2] for path in found.chunks())):
            with found.chunk(name) as path:
                if digest_of(path.read_bytes()) != name:
                    yield path

    async def lost(self, process: ServingProcess) -> list[str]:
        """What was READY and is not there, or cannot be had without the upstream."""
        mirror, lost = self._client(process), []
        for name, document in self.ready.items():
            status = (await mirror.http.get(f"/mirror/{document['id']}")).json().get("status")
            if status != "READY" or await mirror.tree(document["sources"][0]["manifest"]) != repositories()[name]:
                lost.append(f"{name}: {status}")
            elif (await mirror.ready(source(f"hf://{name}")))["bytes_transferred"]:
                lost.append(f"{name}: was copied again")
        if self.done > 3 and "a-secret" not in (await mirror.http.get("/secrets")).text:
            lost.append("the secret")
        return lost
