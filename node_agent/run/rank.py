"""One rank: its directories, its container, its output, and its end."""

import asyncio
import logging
import os
import signal
import threading
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from json import dumps
from math import inf
from pathlib import Path, PurePosixPath
from typing import Final

from bdn.core.errors import BdnError, InternalError, InvalidRequestError, NotFoundError, ScratchFullError, single_error
from bdn.core.pace.retry import RetryPolicy
from bdn.core.training.environment import WORKSPACE
from bdn.core.training.states import RankState
from bdn.disk.durable import disk_errors, remove_tree
from bdn.disk.threads import in_thread
from bdn.net.api_clients import MirrorClient
from bdn.net.client import OutageRetry
from bdn.wire.job_schema import JobVolumeRequest, SyncStatus
from bdn.wire.progress import total_of
from bdn.wire.run_schema import NodeCapacity, RunReport, RunSpec
from bdn.wire.shapes import body_of
from node_agent.disk.cache_directory import boot_id
from node_agent.disk.trash import Trash
from node_agent.job.volume import Volume
from node_agent.job.volumes import JobVolumes
from node_agent.run.archive import archive_in, unpack
from node_agent.run.directory import RunDirectory, RunRecord
from node_agent.run.launchers import LAUNCHERS, RUN_PLACE, Bind, Container
from node_agent.run.output import OutputSender
from node_agent.run.processes import ContainerProcess, container_name, container_of, launch
from node_agent.stage.stage import NodeStage
from node_agent.stage.stages import StageService

logger = logging.getLogger(__name__)
_STOP_SECONDS: Final = 30.0  # between SIGTERM and SIGKILL
_LOOK_SECONDS: Final = 0.1
_MEASURE_SECONDS: Final = 5.0
_AGAIN_SECONDS: Final = 10.0  # after a failed cleanup
_DRAIN_SECONDS: Final = 2.0  # between two reports about checkpoints
# Until the mirror gives the job up: a full cache has room again when another job ends.
_POLICY: Final = RetryPolicy(inf, longest_seconds=20.0)
# Of a job volume's scratch.
_FOLDERS: Final = {"workspace": 0o755, "tmp": 0o1777, "home": 0o700, "scratch": 0o755, "loaded": 0o755}
_DOCKER_HUB: Final = "https://index.docker.io/v1/"  # as docker spells docker.io


@dataclass(frozen=True)
class NodeServices:
    client: MirrorClient
    volumes: JobVolumes
    stages: StageService
    capacity: NodeCapacity
    node: str
    trash: Trash

    async def run_spec(self, run: str, rank: int) -> RunSpec:
        """Raises ``NotFoundError``, as reported by the mirror: the run is not on this node, or over."""
        volume = await self.volumes.caches.identified()
        return await self.client.run_spec(run, rank, node=self.node, boot_id=boot_id(), volume_id=volume)


@dataclass(eq=False)
class Rank:
    """Its task is ``live``. After a kill of the agent, another ``Rank`` continues from the directory.

    ``free_gpus`` returns the indices of GPUs for this rank; ``on_state`` is called when its state has changed.
    """

    run: str
    rank: int
    directory: RunDirectory
    services: NodeServices
    free_gpus: Callable[[int], list[int]]
    on_state: Callable[[], None]
    gpus: list[int] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _stage: NodeStage | None = None
    _volume: Volume | None = None
    _error: BdnError | None = None
    _obstacle: BdnError | None = None  # to staging, for now
    _exit_code: int | None = None
    _may_go: bool = False
    _is_unknown: bool = False
    _is_ended: bool = False  # the container
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _stop_unpacking: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        is_going, is_ready = self.directory.is_going, self.directory.is_ready
        # Also of an adopted rank: the mirror must not see it go back.
        self.state: RankState = "RUNNING" if is_going else "STAGED" if is_ready else "STAGING"
        self._outages = OutageRetry(self._wait_for, _POLICY)
        self._output = OutputSender(
            self.directory, partial(self.services.client.record_run_output, self.run, self.rank)
        )

    @property
    def name(self) -> str:
        return self.directory.path.name

    # --- commands and reports ---

    async def go(self) -> None:
        """Let the commands start, once the rank is STAGED. Idempotent. Raises ``DiskFailedError``."""
        self._may_go = True
        if self.state == "STAGED":
            await in_thread(self.directory.go)
            self._enter("RUNNING")

    def stop(self) -> None:
        """End the rank: SIGTERM, and after half a minute SIGKILL. Idempotent."""
        self._stop.set()
        self._stop_unpacking.set()

    def report(self) -> RunReport:
        stage, volume, error = self._stage, self._volume, self._error or self._obstacle
        document = None if stage is None else self.services.stages.document(stage)
        mounts = [] if document is None else document.mounts
        return RunReport(
            run=self.run,
            rank=self.rank,
            state=self.state,
            bytes_done=sum(mount.bytes_done for mount in mounts),
            bytes_total=None if document is None else total_of([mount.bytes_total for mount in mounts]),
            eta_seconds=None if document is None else document.eta_seconds,
            exit_code=self._exit_code,
            error=None if error is None else body_of(error),
            sync_status=None if volume is None else _sync_status(volume),
            scratch_bytes=None if volume is None else volume.scratch.used,
            scratch_limit_bytes=None if volume is None else volume.scratch.size,
        )

    def _enter(self, state: RankState) -> None:
        self.state = state
        self.on_state()
        logger.info("rank %s", state, extra={"run": self.run, "rank": self.rank})
        self._notify()

    def _notify(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def _wait_for(self, obstacle: BdnError | None) -> None:
        self._obstacle = obstacle
        self._notify()

    # --- life ---

    async def live(self) -> None:
        """Returns once the rank is over and nothing of it is left but its directory. Canceled, it can be adopted."""
        try:
            state = await self._lived()
        except Exception as error:
            if not isinstance(error, BdnError):
                logger.exception("rank %s failed because of a bug", self.name)
            self._error = error if isinstance(error, BdnError) else InternalError(f"{type(error).__name__}: {error}")
            state = "LOST" if self._is_unknown else "ENDED"
            await self._clean()
        self._obstacle = None
        self._enter(state)

    async def _lived(self) -> RankState:
        record = await in_thread(self.directory.record)
        self._volume = next(iter(self._volumes()), None)
        self._stage = next(iter(self._stages()), None)
        if record is not None and record.boot != boot_id():
            await self._clean()
            return "LOST"
        if record is None or not self.directory.is_launched:
            record = await self._prepared()
        if record is None:
            await self._clean()
        else:
            self.gpus = record.gpus
            await self._follow(record)
        return "ENDED"

    async def _prepared(self) -> RunRecord | None:
        """Launch the rank; None if it was stopped before."""
        with single_error():
            async with asyncio.TaskGroup() as group:
                preparing, stopping = group.create_task(self._prepare()), group.create_task(self._stop.wait())
                await asyncio.wait([preparing, stopping], return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                preparing.cancel()
        return None if preparing.cancelled() else preparing.result()

    async def _prepare(self) -> RunRecord:
        record, spec = await self._outages.ask(self._reserved)
        await self._outages.ask(lambda: self._staged(spec))
        container = await in_thread(self._filled, spec, record)
        await in_thread(self._launch, spec, record, container)
        return record

    async def _reserved(self) -> tuple[RunRecord, RunSpec]:
        """Fetch the rank's spec, and create its run directory and job volume."""
        try:
            spec = await self.services.run_spec(self.run, self.rank)
        except BdnError as error:
            self._is_unknown = error.code == NotFoundError.code
            raise
        capacity = self.services.capacity
        self.gpus = []
        self.gpus = self.free_gpus(spec.gpus)
        record = RunRecord(run=self.run, rank=self.rank, boot=boot_id(), launcher=capacity.launcher, gpus=self.gpus)
        await in_thread(self.directory.make, record, spec, _notes(spec, capacity), self.services.trash)
        checkpoint_bytes = spec.checkpoint_bytes
        if spec.push_grant is not None and checkpoint_bytes is None:
            checkpoint_bytes = await in_thread(self.services.volumes.space.default_checkpoint_bytes)
        self._volume = await self.services.volumes.create(
            JobVolumeRequest(
                run_id=self.run,
                rank=self.rank,
                checkpoint_bytes=checkpoint_bytes,
                push_grant=spec.push_grant,
                cache_grant=spec.cache_grant,
                huggingface=spec.caches is not None and spec.caches.huggingface is not None,
            )
        )
        return record, spec

    async def _staged(self, spec: RunSpec) -> None:
        """Every byte of the weights, before the container exists. A stage that failed begins anew."""
        if spec.read_grant is not None:
            self._stage = await self.services.stages.start(self.run, spec.read_grant)
            await self.services.stages.finish(self._stage.record.id)

    def _filled(self, spec: RunSpec, record: RunRecord) -> Container:
        """Make the folders of scratch and unpack the archive. Blocking."""
        volume, stage = self._volume, self._stage
        assert volume is not None  # noqa: S101 - reserved before
        scratch, capacity = volume.scratch.place.resolve(), self.services.capacity
        with disk_errors(scratch):
            for name, mode in _FOLDERS.items():
                remove_tree(scratch / name)  # of an earlier attempt
                (scratch / name).mkdir()
                (scratch / name).chmod(mode)
        shown: dict[str, Path] = {}
        if stage is not None:
            path_of = self.services.stages.path_of
            shown = {one.mount_location: path_of(stage.record, one).resolve() for one in stage.record.mounts}
        if spec.archive is not None:
            unpack(
                archive_in(shown.pop(spec.archive)), scratch / "workspace", volume.scratch.size, self._stop_unpacking
            )
        return Container(
            name=container_name(record),
            binds=tuple(self._binds(spec, volume, scratch, shown)),
            home=scratch / "home",
            image=spec.image,
            working_dir=spec.working_dir,
            cpus=None if spec.cpus is None else min(spec.cpus, capacity.cpus),
            memory_bytes=None if spec.memory_bytes is None else min(spec.memory_bytes, capacity.memory_bytes),
            gpus=tuple(record.gpus),
            login=None if spec.login is None else self.directory.login,
            has_infiniband=Path("/dev/infiniband").is_dir(),
            is_root=os.geteuid() == 0,
            has_scopes=_has_systemd(),
        )

    def _binds(self, spec: RunSpec, volume: Volume, scratch: Path, shown: dict[str, Path]) -> Iterator[Bind]:
        yield Bind(self.directory.shared, RUN_PLACE, is_writable=True)
        yield Bind(scratch / "workspace", WORKSPACE, is_writable=True)
        yield Bind(scratch / "tmp", "/tmp", is_writable=True)  # noqa: S108 - in the container
        yield Bind(scratch / "scratch", spec.scratch, is_writable=True)
        if spec.checkpoints is not None and volume.checkpoints is not None:
            yield Bind(volume.checkpoints.place, spec.checkpoints, is_writable=True)
        if spec.caches is not None and (caches := volume.record.caches) is not None:
            yield Bind(Path(caches.project), spec.caches.project, is_writable=True)
            yield Bind(Path(caches.team), spec.caches.team, is_writable=True)
            if spec.caches.huggingface is not None and caches.huggingface is not None:
                yield Bind(Path(caches.huggingface), spec.caches.huggingface, is_writable=True)
        for place, path in shown.items():
            yield Bind(path, place)
        if spec.loaded is not None and not any(PurePosixPath(place).is_relative_to(spec.loaded) for place in shown):
            yield Bind(scratch / "loaded", spec.loaded)  # empty: nothing was loaded

    def _launch(self, spec: RunSpec, record: RunRecord, container: Container) -> None:
        if record.launcher != "bwrap" and spec.image is None:
            raise InvalidRequestError(f"the job names no image, which {record.launcher} needs")
        container_of(self.directory, record).remove()  # of an agent that was killed before it recorded its process
        if spec.login is not None:
            is_hub = record.launcher == "docker" and spec.login.registry == "docker.io"
            login = b64encode(f"{spec.login.username}:{spec.login.password}".encode()).decode()
            registry = _DOCKER_HUB if is_hub else spec.login.registry
            self.directory.write_login(dumps({"auths": {registry: {"auth": login}}}))
        launch(self.directory, LAUNCHERS[record.launcher](container))

    async def _follow(self, record: RunRecord) -> None:
        """Until the container has ended, its output is sent, and its directories are gone."""
        await in_thread(self._output.load)
        if self.directory.is_ready:
            await in_thread(self.directory.remove_login)
        with single_error():
            async with asyncio.TaskGroup() as group:
                group.create_task(self._output.send_all(lambda: self._is_ended))
                await self._watch(container_of(self.directory, record), record)
                self._is_ended = True
                with suppress(BdnError):
                    await self._output.bound(is_end=True)
                await self._measure_scratch()
                await self._clean()  # not later: the mirror may take no output for hours

    async def _watch(self, process: ContainerProcess, record: RunRecord) -> None:
        """Report states and pass on commands until the container has ended; then note why."""
        loop = asyncio.get_running_loop()
        stopped_at: float | None = None
        measure_at = 0.0
        while await in_thread(process.is_alive):
            if self.state == "STAGING" and self.directory.is_ready:
                await in_thread(self.directory.remove_login)
                self._enter("STAGED")
            if self._may_go:
                await self.go()
            if isinstance(full := self._volume and self._volume.error, ScratchFullError) and self._error is None:
                self._error = full
                self.stop()
            if self._stop.is_set() and stopped_at is None:
                stopped_at = loop.time()
                # Before it is ready no command has run, and ``start.sh`` may not handle signals yet.
                await in_thread(process.signal, signal.SIGTERM if self.directory.is_ready else signal.SIGKILL)
            elif stopped_at is not None and loop.time() - stopped_at > _STOP_SECONDS:
                await in_thread(process.signal, signal.SIGKILL)
            with suppress(BdnError):
                await self._output.bound()
            if self._error is None and loop.time() >= measure_at:
                measure_at = loop.time() + _MEASURE_SECONDS
                await self._measure()
            await asyncio.sleep(_LOOK_SECONDS)
        self._exit_code = await in_thread(self.directory.exit_code)
        if self._exit_code is None and self.directory.is_ready:
            self._exit_code = await in_thread(process.exit_code)
        elif self._exit_code is None and not self._stop.is_set():
            reason = await in_thread(self.directory.last_words)
            self._error = InvalidRequestError(f"{record.launcher} could not start the rank: {reason}")

    async def _measure(self) -> None:
        """Stop the rank if ``/b10/run`` holds too much."""
        try:
            await in_thread(self.directory.check_size)
        except ScratchFullError as error:
            self._error = error
            self.stop()
        except BdnError as error:
            logger.warning("cannot measure the directory of rank %s; retrying: %s", self.name, error)

    # --- end ---

    async def _measure_scratch(self) -> None:
        """Measure scratch before it is removed: the final report has what a short job used."""
        if self._volume is not None and self._volume.state == "OPEN":
            with suppress(BdnError):  # what was measured before stays
                await in_thread(self._volume.scratch.look)

    async def _clean(self) -> None:
        """Remove the container, drain and remove the job volume, release the stage."""
        await self._repeat(self._remove_container)
        self.gpus = []  # for other ranks, while checkpoints are pushed
        volumes = self.services.volumes
        for volume in self._volumes():
            self._volume = volume  # also one that a stop interrupted: it was created to the end
            await self._repeat(partial(volumes.end, volume))
            while not volume.is_gone:
                await volumes.wait(volume, _DRAIN_SECONDS)
                self._notify()
        for stage in self._stages():
            await self._repeat(partial(self.services.stages.release, stage.record.id))

    def _volumes(self) -> list[Volume]:
        return [one for one in self.services.volumes.all() if one.key == (self.run, self.rank)]

    def _stages(self) -> list[NodeStage]:
        found = self.services.stages.registry.all()
        return [one for one in found if one.record.job_id == self.run and one.record.state != "RELEASED"]

    async def _remove_container(self) -> None:
        if (record := await in_thread(self.directory.record)) is not None:
            if record.boot == boot_id() or record.launcher != "bwrap":  # no process of an earlier boot is ours
                await in_thread(container_of(self.directory, record).remove)
            await in_thread(self.directory.remove_login)

    async def _repeat(self, work: Callable[[], Awaitable[object]]) -> None:
        """Until it succeeds: a rank is not over while something of it is left."""
        while True:
            try:
                await work()
            except Exception as error:
                is_bug = not isinstance(error, BdnError)
                logger.warning("cannot clean up after rank %s; retrying in 10 s: %s", self.name, error, exc_info=is_bug)
                await asyncio.sleep(_AGAIN_SECONDS)
            else:
                return


def _sync_status(volume: Volume) -> SyncStatus | None:
    if volume.record.checkpoint_bytes is None:
        return None
    checkpoints = volume.document().checkpoints
    if volume.is_gone or checkpoints is None:
        return "COMPLETED" if volume.is_gone else "SYNCING"
    return checkpoints.sync_status


def _has_systemd() -> bool:
    return Path("/run/systemd/system").is_dir()


def _notes(spec: RunSpec, capacity: NodeCapacity) -> Iterator[str]:
    """The first lines of the output: what the node does otherwise than the job requested."""
    if spec.cpus is not None and spec.cpus > capacity.cpus:
        yield f"bdn: the job requests {spec.cpus} CPUs, and this node has {capacity.cpus}: all of them are its limit"
    if spec.memory_bytes is not None and spec.memory_bytes > capacity.memory_bytes:
        yield "bdn: the job requests more memory than this node has: all of it is its limit"
    if capacity.launcher == "bwrap":
        yield "bdn: this node has no container engine: the image is not used, the commands find this machine's programs"
        if not (_has_systemd() and os.geteuid() == 0):
            yield "bdn: limits of CPUs and memory are not enforced here, since that needs systemd and root"
