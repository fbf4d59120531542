"""A job that writes checkpoints on one machine and the mirror that takes them on another; each is killed, or loses its power, again and again.

After each time whatever is listed is a state that the job left a checkpoint in, and what was listed once still is.
"""

import asyncio
import json
import shutil
import sqlite3
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

from bdn.core.chunk import digest_of
from bdn.core.errors import BdnError, NotFoundError
from bdn.disk.durable import write_durably
from bdn.mirror.app import MirrorService
from bdn.net.api_clients import MirrorClient
from bdn.wire.job_schema import LEAST_BYTES, JobVolume, JobVolumeRequest
from bdn.wire.push_schema import PushGrantRequest
from tests.support.agent.process import LONGEST_SECONDS, Daemon, Program
from tests.support.crash.forgetful_disk import ForgetfulDisk, Way
from tests.support.crash.writing_job import MOST, State, WritingJob
from tests.support.mirror.process import SERVE, ServingProcess
from tests.support.mirror.service import MirrorUnderTest
from tests.support.network.ports import free_port

JOB: Final = "bt://llama@job"
FAULTS: Final = {"agent": 55, "mirror": 30, "power of the node": 10, "power of the mirror": 5}  # so many of a hundred
STREAMS: Final = 8  # threads of an agent's pusher, each with one chunk on its way
# So many steps a life has at most, on the node's disk and on the mirror's: a chunk takes about thirty of these. One life in four is short.
_STEPS: Final = (1_000, 16_000)
_SHORT_STEPS: Final = (200, 100)
_ROOM: Final = 20 * LEAST_BYTES
_HANGS_SECONDS: Final = 1800.0  # a busy machine may need minutes to scan a disk that a program of ours serves


@dataclass
class KilledSyncs:
    """What lives on the two disks. ``counts`` are of faults, by name."""

    root: Path
    node: ForgetfulDisk
    central: ForgetfulDisk
    random: Random
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))
    listed: dict[str, str] = field(default_factory=dict)  # manifests, by checkpoint
    versions: int = 0
    run: int = 0
    volume: JobVolume | None = None

    def __post_init__(self) -> None:
        self.job = WritingJob(self.random)
        self._ports = free_port(), free_port()
        self._mirror: ServingProcess | None = None
        self._daemon: Daemon | None = None
        self._lives = AsyncExitStack()
        self._checked: dict[str, State] = {}
        # Chunks that a mirror had not written down when it ended; a power cut may take them, too.
        self._stored: dict[str, int] = {}

    @property
    def _data_dir(self) -> Path:
        return self.central.place / "mirror"

    @property
    def kills(self) -> int:
        return sum(self.counts.values())

    async def live(self, kills: int) -> None:
        """So many faults, and then to the end: all that lies there when the job ends is listed."""
        async with self._lives:
            # The one chunk of 8 MiB weighs more than all others that kills cost. It is there before the first.
            await self._begin()
            self.job.write_large()
            await self._until_pushed()
            while self.kills < kills:
                await self._begin()
                await self.check()
                await self._until_fault()
            daemon = await self._begin()
            self.job.act()
            assert self.volume is not None
            await daemon.client.end_volume(self.volume.id)
            async with asyncio.timeout(LONGEST_SECONDS):
                while (await daemon.client.volumes()).items:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
            await self.check()
            found = {name: self._checked[manifest] for name, manifest in self.listed.items()}
            assert {name: found.get(name) for name in self.job.current} == self.job.current

    # --- what lives ---

    async def _begin(self) -> Daemon:
        """Start what is dead."""
        if self._mirror is None or self._mirror.process.returncode is not None:
            ports = ("--port", str(self._ports[0]), "--data-port", str(self._ports[1]))
            started = await ServingProcess.start(self._data_dir, command=(*SERVE, *ports))
            self._mirror = await self._lives.enter_async_context(started)
        if self._daemon is None or self._daemon.process.returncode is not None:
            self._daemon = await self._lives.enter_async_context(self._program.daemon())
        if self.volume is None:
            async with MirrorClient(self._mirror.url, None) as client:
                grant = (await client.grant_pushes(PushGrantRequest(job=JOB))).grant
            request = JobVolumeRequest(
                run_id=f"run-{self.run}", scratch_bytes=LEAST_BYTES, checkpoint_bytes=8 * LEAST_BYTES, push_grant=grant
            )
            self.volume = await self._daemon.client.make_volume(request)
            assert self.volume.checkpoints is not None
            self.job.begin(Path(self.volume.checkpoints.path))
        checkpoints = (await self._daemon.client.volume(self.volume.id)).checkpoints
        assert checkpoints is not None
        self.job.kept = frozenset(checkpoints.pushed)
        return self._daemon

    @property
    def _program(self) -> Program:
        given = {
            "BDN_AGENT_CACHE_DIR": str(self.node.place / "cache"),
            "BDN_AGENT_CACHE_BYTES": str(_ROOM),
            "BDN_AGENT_SETTLE_SECONDS": "0",
            "BDN_AGENT_KEEP_CHECKPOINT": "false",
            "BDN_OUTAGE_SECONDS": str(LONGEST_SECONDS),
        }
        return Program(self.root / "agent", f"http://127.0.0.1:{self._ports[0]}", given)

    # --- what happens to them ---

    async def _until_fault(self) -> None:
        assert self._mirror is not None
        assert self._daemon is not None
        (kind,) = self.random.choices(list(FAULTS), list(FAULTS.values()))
        is_node = kind in ("agent", "power of the node")
        disk, process = (self.node, self._daemon.process) if is_node else (self.central, self._mirror.process)
        longest = _SHORT_STEPS if self.random.random() < 0.25 else _STEPS
        step = self.random.randint(1, longest[0 if is_node else 1])
        (disk.fail_at if kind.startswith("power") else disk.kill_at)(step, [process.pid])
        ended = asyncio.ensure_future(process.wait())
        while not ended.done():
            try:
                await asyncio.to_thread(self.job.act)
            except OSError:
                assert disk.is_dark, kind
                break
            if self.random.random() < 1 / MOST:
                await self._until_pushed(ended)
        await ended
        self.counts[kind] += 1
        if kind.startswith("power"):
            way: Way = self.random.choice(("forgotten", "any", "any", "kept"))
            disk.lose_power(way, self.random.getrandbits(30))
        if not is_node:
            self._look_at_what_is_left()
        elif kind.startswith("power"):
            self._restart_machine()

    async def _until_pushed(self, ended: asyncio.Future[int] | None = None) -> None:
        """Until the agent has pushed all that the job has left, or the process that dies has done so. Fails when nothing more was pushed for ``_HANGS_SECONDS``."""
        assert self._daemon is not None
        assert self.volume is not None
        pushed, loop = set[str](), asyncio.get_running_loop()
        async with asyncio.timeout(_HANGS_SECONDS) as deadline:
            while ended is None or not ended.done():
                try:
                    checkpoints = (await self._daemon.client.volume(self.volume.id)).checkpoints
                except BdnError:
                    assert ended is not None
                    await ended  # it was the agent that died
                    return
                assert checkpoints is not None
                if self.job.current.keys() <= set(checkpoints.pushed):
                    return
                if pushed != set(checkpoints.pushed):
                    pushed = set(checkpoints.pushed)
                    deadline.reschedule(loop.time() + _HANGS_SECONDS)
                await asyncio.sleep(0.05)

    def _look_at_what_is_left(self) -> None:
        """Count what the dead mirror had not written down. The next one does not run yet: chunks would be sent to it meanwhile."""
        unwritten = self._unwritten()
        assert len(unwritten.keys() - self._stored.keys()) <= STREAMS, "more than a chunk of each stream is sent again"
        self._stored |= unwritten

    def _restart_machine(self) -> None:
        """The kernel has another name for its time, and the run has ended."""
        cache = self.node.place / "cache"
        (cache / "owner").unlink(missing_ok=True)
        for path in cache.glob("jobs/*/volume.json"):
            with suppress(ValueError):  # the power failed before it was there
                write_durably(path, json.dumps(json.loads(path.read_bytes()) | {"boot": "another"}).encode())
        self.volume, self.run = None, self.run + 1

    # --- what is seen ---

    async def check(self) -> None:
        """What is listed is what the job left, and all that was listed still is."""
        assert self._mirror is not None
        mirror = MirrorUnderTest(cast("MirrorService", None), self._mirror.http, self._mirror.data_dir)
        items = (await self._mirror.http.get("/checkpoints")).json()["items"]
        found = {item["checkpoint_id"]: item["manifest"] for item in items}
        lost = self.listed.keys() - found.keys()
        assert not lost, f"{self._where()}: {lost} were listed before"
        for name, manifest in found.items():
            if self.listed.get(name) == manifest:
                continue
            if manifest not in self._checked:
                try:
                    contents = await mirror.tree(manifest)
                    self._checked[manifest] = {path: str(digest_of(content)) for path, content in contents.items()}
                except (AssertionError, NotFoundError):
                    if await self._is_replaced(name, manifest):
                        continue  # what came instead is looked at the next time
                    raise
            assert self._checked[manifest] in self.job.states.get(name, ()), f"{self._where()}: {name} never was this"
            self.versions += 1
        self.listed = found

    async def _is_replaced(self, name: str, manifest: str) -> bool:
        """Another version of the checkpoint was listed meanwhile, and this one was given up."""
        assert self._mirror is not None
        http = self._mirror.http
        status = (await http.get(f"/manifests/{manifest}")).status_code
        if status == 404:
            items = (await http.get("/checkpoints")).json()["items"]
            assert manifest not in {item["manifest"] for item in items}, f"{self._where()}: {name} is listed and gone"
            assert name in {item["checkpoint_id"] for item in items}, f"{self._where()}: {name} was listed before"
        return status == 404

    def sent_again(self) -> tuple[int, int]:
        """Bytes of whole chunks that came more than once, and once; the mirror counts them before it stores them."""
        chunks = self._chunks()
        pushed = self._query("SELECT facts FROM events WHERE kind = 'pushed'")
        under_way = self._query("SELECT sum(bytes_transferred) FROM mirror_sources WHERE status <> 'READY'")
        written = sum(json.loads(facts)["transferred"] for (facts,) in pushed) + (under_way[0][0] or 0)
        once = sum(chunks.values())  # pages and roots among them, which are small
        return written - once, once

    def _chunks(self) -> dict[str, int]:
        found = self.central.sizes("mirror/store/chunks")
        return {path.rpartition("/")[2]: size for path, size in found.items()}

    def _unwritten(self) -> dict[str, int]:
        """Chunks that are in the store, but were not written down: whoever sent them will send them again."""
        known = self._written()
        return {name: size for name, size in self._chunks().items() if name not in known}

    def _written(self) -> set[str]:
        """Chunks that the mirror has written down. It need not run: its database is read from a copy."""
        with TemporaryDirectory() as name:
            for path in self._data_dir.glob("mirror.sqlite*"):
                shutil.copyfile(path, Path(name) / path.name)
            with closing(sqlite3.connect(Path(name) / "mirror.sqlite")) as connection:
                has_it = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'chunks'").fetchall()
                stored = "SELECT lower(hex(digest)) FROM chunks WHERE state = 'stored'"
                return {str(name) for (name,) in connection.execute(stored)} if has_it else set()

    def _query(self, query: str) -> list[tuple[Any, ...]]:
        assert self._mirror is not None
        return self._mirror.query(query)

    def _where(self) -> str:
        return f"after {self.counts}"
