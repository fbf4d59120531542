"""An agent on a disk whose power fails: what a job controller asks of it, step by step, and what is left of it afterwards."""

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from bdn.core.chunk import CHUNK_SIZE, digest_of, file_digest
from bdn.core.errors import BdnError
from bdn.core.layout import Manifest
from bdn.wire.stage_schema import StageDocument, stage_id_of
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.process import Daemon, Program
from tests.support.agent.rig import disk_bytes
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.crash.killing_steps import is_done_before_the_end

Tree = dict[str, bytes]


@cache
def trees() -> dict[str, Tree]:
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


BUDGET: Final = CHUNK_SIZE + 100_000 + 5 * MIB + MIB // 2  # a and one of the others: c evicts b


JOBS: Final = {"job-a": "a", "job-b": "b", "job-c": "c", "job-d": "a"}  # what they stage


@dataclass
class Life:
    """What the controller knows: which stages it was told are READY, and how far it has come."""

    ready: dict[str, StageDocument] = field(default_factory=dict)  # by job
    done: int = 0


@dataclass
class Node:
    """One agent's directory on ``disk`` (any folder), and the controller who uses it."""

    mirror: AgentMirror
    place: Path
    logs: Path
    life: Life = field(default_factory=Life)

    def __post_init__(self) -> None:
        self.manifests: dict[str, Manifest] = {name: self.mirror.publish(files) for name, files in trees().items()}
        self.program = Program(
            self.logs,
            self.mirror.url,
            {"BDN_AGENT_CACHE_DIR": str(self.cache), "BDN_AGENT_CACHE_BYTES": str(BUDGET)},
        )

    @property
    def cache(self) -> Path:
        return self.place / "cache"

    def view(self, job: str) -> Path:
        """Where the job finds its files."""
        manifests = {"/m0": str(self.manifests[JOBS[job]].digest)}
        return self.cache / "mounts" / stage_id_of(job, "org", manifests) / "m0"

    # --- the controller ---

    async def live(self, daemon: Daemon) -> None:
        """Go on with the next thing that the controller wants, to the end."""
        actions = [
            (self._stage, "job-a"),
            (self._stage, "job-b"),
            (self._release, "job-b"),
            (self._stage, "job-c"),
            (self._stage, "job-d"),
            (self._release, "job-d"),
        ]
        for action, job in actions[self.life.done :]:
            await action(daemon, job)
            self.life.done += 1

    async def until_killed(self, daemon: Daemon) -> bool:
        """The same, until the agent's process has ended; whether all was done before."""
        return await is_done_before_the_end(self.live(daemon), daemon.process, BdnError)

    async def _stage(self, daemon: Daemon, job: str) -> None:
        self.life.ready[job] = await daemon.staged(job, self.mirror.grant(self.manifests[JOBS[job]]))

    async def _release(self, daemon: Daemon, job: str) -> None:
        stage = self.life.ready.pop(job, None)
        if stage is not None:
            with suppress(BdnError):
                await daemon.client.unstage(stage.id)

    @staticmethod
    async def kill(daemon: Daemon) -> None:
        """If it still lives."""
        with suppress(ProcessLookupError):
            await daemon.kill()

    # --- what is left ---

    async def goes_on(self, daemon: Daemon, case: str) -> None:
        """Check that what was READY is there, without having been fetched again, and that all else can be done."""
        lost = await self.lost_stages(daemon)
        assert not lost, f"{case}: {lost}"
        assert not self.fetched_again(), f"{case}: what was READY was fetched again"
        await self.live(daemon)
        assert not self.wrong_files(), case
        difference = await self.ledger_differs(daemon)
        assert difference is None, f"{case}: {difference}"

    def restart_machine(self) -> None:
        """What a power loss does besides: the kernel has another name for its time, if anything says so."""
        owner = self.cache / "owner"
        if owner.exists():
            owner.write_text(json.dumps({"pid": 1, "boot_id": "another"}))

    def wrong_files(self) -> list[str]:
        """Whole files and files of views that are not what they should be. Absent ones are none."""
        return [*self._wrong_whole(), *self._wrong_in_views()]

    def _wrong_whole(self) -> Iterator[str]:
        for path in self.cache.glob("files/*/[!.]*"):
            content = path.read_bytes()
            chunks = [content[start : start + CHUNK_SIZE] for start in range(0, len(content), CHUNK_SIZE)]
            if file_digest(len(content), map(digest_of, chunks)).hex != path.name:
                yield str(path)

    def _wrong_in_views(self) -> Iterator[str]:
        known = set(itertools.chain.from_iterable(files.items() for files in trees().values()))
        for view in self.cache.glob("mounts/stg_*/m0"):
            if ".building" not in view.parent.name:
                for path, content in tree(view).items():
                    if (path, content) not in known:
                        yield f"{view}: {path}"

    async def lost_stages(self, daemon: Daemon) -> list[str]:
        """Jobs that were told READY and do not have their files now, each after the agent had the time to mend it."""
        lost = []
        for job, known in self.life.ready.items():
            try:
                stage = await daemon.ended(await daemon.client.stage_by_id(known.id, 60))
            except BdnError as error:
                lost.append(f"{job}: {error}")
                continue
            if stage.state != "READY" or tree(Path(stage.mounts[0].path)) != trees()[JOBS[job]]:
                lost.append(f"{job}: {stage.state} {stage.error}")
        return lost

    def fetched_again(self) -> int:
        """Chunks of READY stages that were asked for since the mirror's counters were forgotten."""
        held = {stage.mounts[0].manifest for stage in self.life.ready.values()}
        chunks = {
            chunk
            for manifest in self.manifests.values()
            if str(manifest.digest) in held
            for path in (entry.path for entry in manifest.files if entry.size)
            for chunk in self.mirror.chunks(manifest, path)
        }
        return sum(self.mirror.chunk_requests[chunk] for chunk in chunks)

    async def ledger_differs(self, daemon: Daemon) -> str | None:
        """None when the cache's figures are what is on the disk, and nothing is left of what was under way."""
        use = (await daemon.client.cache()).tiers["node"]
        there = disk_bytes(self.cache)
        stray = [
            *(self.cache / "filling").iterdir(),
            *self.cache.glob("files/*/.*"),
            *self.cache.glob("mounts/*.building"),
        ]
        stray += [*(self.cache / "cluster/incoming").iterdir(), *self.cache.glob("*/*.tmp")]
        if (use.committed, use.reserved) == (there, 0) and not stray:
            return None
        return f"committed {use.committed}, reserved {use.reserved}, on disk {there}, left over {stray}"
