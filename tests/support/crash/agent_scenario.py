"""What a job controller asks of an agent, step by step, and what an agent that died has to show for it."""

import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Final

from bdn.core.chunk import CHUNK_SIZE, digest_of, file_digest
from bdn.core.errors import BdnError
from bdn.wire.stage_schema import StageDocument
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.process import Daemon, Program
from tests.support.agent.rig import disk_bytes
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.crash.scenario import Action, Scenario

BUDGET: Final = CHUNK_SIZE + 100_000 + 5 * MIB + MIB // 2  # a and one of the others: c evicts b
JOBS: Final = {"job-a": "a", "job-b": "b", "job-c": "c", "job-d": "a"}  # what they stage


@cache
def trees() -> dict[str, dict[str, bytes]]:
    """Files of every kind, by the name of their manifest: of several chunks, of one, and packed ones."""
    small = {
        name: {f"{name}/{number}.bin": noise(60_000, 100 * seed + number) for number in range(12)}
        for seed, name in enumerate("abc")
    }
    return {
        "a": {"weights.bin": noise(CHUNK_SIZE + 100_000, 1), "one.bin": noise(MIB + 5, 2), "none": b"", **small["a"]},
        "b": {"other.bin": noise(MIB + 7, 3), **small["b"]},
        "c": {"more.bin": noise(MIB + 9, 4), **small["c"]},
    }


class AgentScenario(Scenario[Daemon]):
    """Stages of four jobs. ``ready`` is what the controller was told is READY, by job."""

    def __init__(self, mirror: AgentMirror, place: Path, logs: Path) -> None:
        self.mirror, self.cache = mirror, place / "cache"
        self.ready: dict[str, StageDocument] = {}
        self.manifests = {name: mirror.publish(files) for name, files in trees().items()}
        given = {"BDN_AGENT_CACHE_DIR": str(self.cache), "BDN_AGENT_CACHE_BYTES": str(BUDGET)}
        self.program = Program(logs, mirror.url, given)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Daemon]:
        self.mirror.forget()
        async with self.program.daemon() as daemon:
            yield daemon

    def actions(self, program: Daemon) -> Sequence[Action]:
        stage, release = partial(self._stage, program), partial(self._release, program)
        done = (stage, "job-a"), (stage, "job-b"), (release, "job-b"), (stage, "job-c"), (stage, "job-d")
        return [partial(action, job) for action, job in (*done, (release, "job-d"))]

    async def _stage(self, daemon: Daemon, job: str) -> None:
        self.ready[job] = await daemon.staged(job, self.mirror.grant(self.manifests[JOBS[job]]))

    async def _release(self, daemon: Daemon, job: str) -> None:
        if stage := self.ready.pop(job, None):
            with suppress(BdnError):
                await daemon.client.unstage(stage.id)

    def power_is_back(self) -> None:
        """The kernel has another boot ID, if the owner's file is there at all."""
        owner = self.cache / "owner"
        if owner.exists():
            owner.write_text(json.dumps({"pid": 1, "boot_id": "another"}))

    def wrong_files(self) -> Iterator[str]:
        """Whole files and files of views."""
        for path in self.cache.glob("files/*/[!.]*"):
            content = path.read_bytes()
            chunks = [content[start : start + CHUNK_SIZE] for start in range(0, len(content), CHUNK_SIZE)]
            if file_digest(len(content), map(digest_of, chunks)).hex != path.name:
                yield str(path)
        known = set(itertools.chain.from_iterable(files.items() for files in trees().values()))
        for view in self.cache.glob("mounts/stg_*/m0"):
            if ".building" not in view.parent.name:
                yield from (f"{view}: {path}" for path, content in tree(view).items() if (path, content) not in known)

    async def check(self, program: Daemon, case: str) -> None:
        """Stages that were READY are, each after the agent had the time to mend it, and nothing of them is fetched again."""
        for job, known in self.ready.items():
            stage = await program.ended(await program.client.stage_by_id(known.id, 60))
            assert stage.state == "READY", f"{job}: {stage.state} {stage.error}, {case}"
            assert tree(Path(stage.mounts[0].path)) == trees()[JOBS[job]], f"{job}, {case}"
        held = {stage.mounts[0].manifest for stage in self.ready.values()}
        for manifest in self.manifests.values():
            if str(manifest.digest) in held:
                chunks = {c for entry in manifest.files if entry.size for c in self.mirror.chunks(manifest, entry.path)}
                assert not chunks & self.mirror.chunk_requests.keys(), f"what was READY was fetched again, {case}"

    async def check_end(self, program: Daemon, case: str) -> None:
        """The cache's figures are what is on the disk, and nothing is left of what was under way."""
        assert not list(self.wrong_files()), case
        use = (await program.client.cache()).tiers["node"]
        assert (use.committed, use.reserved) == (disk_bytes(self.cache), 0), case
        under_way = ("filling/*", "files/*/.*", "mounts/*.building", "cluster/incoming/*", "*/*.tmp")
        assert not [path for pattern in under_way for path in self.cache.glob(pattern)], case
