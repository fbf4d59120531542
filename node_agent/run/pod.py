"""A rank in a pod of Kubernetes: its files before its commands start, and its output and checkpoints until they are sent."""

import asyncio
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, Field

from bdn.core.errors import BdnError, CallerError, NotFoundError, UnauthenticatedError, single_error
from bdn.core.pace.retry import RetryPolicy
from bdn.core.source.uri import CheckpointUri
from bdn.core.training.environment import WORKSPACE
from bdn.core.units import format_duration
from bdn.disk.durable import disk_errors, remove_tree
from bdn.disk.threads import in_thread
from bdn.net.api_clients import MirrorClient
from bdn.net.client import OutageRetry
from bdn.net.tls import Authorities
from bdn.settings import FileSettings, LogForm, ServiceUrl
from bdn.wire.run_schema import Rank, RunId, RunOutput, RunSpec
from bdn.wire.shapes import ServiceUnreachableError
from node_agent.background_tasks import happens_within
from node_agent.job.sync_directory import opened_syncer
from node_agent.job.syncing import AGAIN_SECONDS, Syncer
from node_agent.run.archive import archive_in, unpack
from node_agent.run.directory import RunDirectory, write_private
from node_agent.run.liveness import Liveness, make_alive
from node_agent.run.output import OutputSender

logger = logging.getLogger(__name__)
DIRECTORY: Final = "/rank"
WANT: Final = "/podinfo/want"
_LOOK_SECONDS: Final = 0.1
_KEYS_SECONDS: Final = 120.0  # the mirror reads the keys of a cluster once a minute
_GO: Final = "go"
_POLICY: Final = RetryPolicy(inf, longest_seconds=5.0)  # the pod's Job bounds it
_Answer = TypeVar("_Answer")


class PodSettings(FileSettings):
    """``run``, ``node`` and ``pod_uid`` are the pod's, from the environment alone."""

    url: ServiceUrl = "http://127.0.0.1:8460"
    tls_ca: Path | None = None
    log: LogForm = "logfmt"
    token_file: Path | None = Field(default=None, validation_alias="BDN_AGENT_TOKEN_FILE")
    run: RunId
    rank: Annotated[int, Field(ge=0, lt=1000)] = Field(default=0, validation_alias="JOB_COMPLETION_INDEX")
    node: Annotated[str, Field(min_length=1, max_length=256)]
    pod_uid: Annotated[str, Field(min_length=1, max_length=256)]

    def client(self) -> MirrorClient:
        return MirrorClient(self.url, token_file=self.token_file, authorities=Authorities(self.tls_ca))


class PodRecord(BaseModel):
    """What ``follow`` must know. It is in the volume that BDN's containers alone see."""

    run: RunId
    rank: Rank
    project: str
    checkpoints: str | None
    checkpoint_bytes: int | None
    push_grant: Annotated[str | None, Field(repr=False)]

    @classmethod
    def of(cls, spec: RunSpec) -> "PodRecord":
        own = spec.model_dump(include={"run", "rank", "checkpoints", "checkpoint_bytes", "push_grant"})
        return cls(project=spec.environment["BT_TRAINING_PROJECT_ID"], **own)

    @classmethod
    def in_directory(cls, directory: RunDirectory) -> "PodRecord":
        """Blocking. Raises ``DiskFailedError``: ``prepare`` has not ended with success."""
        with disk_errors(directory.path):
            return cls.model_validate_json(_record_of(directory).read_bytes())

    @property
    def job(self) -> CheckpointUri:
        return CheckpointUri(self.project, self.run, None, self.rank)


class NotYetKnownError(CallerError):
    """Passes when the mirror has seen all pods of the job on nodes, and has the newest keys of the cluster."""

    transient = True
    template = "it does not know this pod yet: {reason}"
    reason: str


# --- before the commands start ---


async def prepare(settings: PodSettings, root: Path) -> None:
    """Fetch what the rank needs, and write its run directory and workspace. May be repeated until the rank starts.

    ``root`` is the file system of the container. Waits for the mirror. SIGTERM ends the process at once. Raises ``BdnError``.
    """
    _on_sigterm(lambda: os._exit(128 + signal.SIGTERM))
    began = time.monotonic()
    waits = OutageRetry(_log_outage, _POLICY)
    async with settings.client() as mirror:
        spec = await waits.ask(lambda: _spec(mirror, settings, began))
    await in_thread(_fill, root, spec)
    logger.info("rank prepared", extra={"run": spec.run, "rank": spec.rank})


def _log_outage(error: BdnError | None) -> None:
    if error is not None:
        logger.warning("waiting for the mirror: %s", error)


async def _spec(mirror: MirrorClient, settings: PodSettings, began: float) -> RunSpec:
    try:
        return await mirror.run_spec(settings.run, settings.rank, node=settings.node, boot_id=settings.pod_uid)
    except BdnError as error:
        is_early = time.monotonic() - began < _KEYS_SECONDS
        if error.code == NotFoundError.code or (is_early and error.code == UnauthenticatedError.code):
            raise NotYetKnownError(error.message) from error
        raise


def _fill(root: Path, spec: RunSpec) -> None:
    directory, workspace = RunDirectory(_below(root, DIRECTORY)), _below(root, WORKSPACE).resolve()
    directory.fill(spec)
    make_alive(directory.alive)
    if spec.archive is not None:
        with disk_errors(workspace):
            for path in workspace.iterdir():  # of an earlier attempt
                remove_tree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            free = shutil.disk_usage(workspace).free
        unpack(archive_in(_below(root, spec.archive)), workspace, free, threading.Event())
    with disk_errors(directory.path):
        write_private(_record_of(directory), PodRecord.of(spec).model_dump_json())


def _on_sigterm(do: Callable[[], None]) -> None:
    """Until here the signal was blocked: process 1 of a container would lose it."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, do)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _record_of(directory: RunDirectory) -> Path:
    return directory.path / "pod.json"


def _below(root: Path, place: str) -> Path:
    return root / place.lstrip("/")


# --- until everything is sent ---


async def follow(settings: PodSettings, root: Path) -> None:
    """Pass on ``go``; send output and checkpoints until the rank has ended and the mirror has stored both.

    SIGTERM does not end it while a process of the rank lives: the rest is sent after its end. Raises ``BdnError``: some of it
    is given up, because the mirror took nothing for an hour, or refused it for an hour.
    """
    directory = RunDirectory(_below(root, DIRECTORY))
    record = await in_thread(PodRecord.in_directory, directory)
    async with AsyncExitStack() as stack:
        life = stack.enter_context(Liveness(directory))
        mirror = await stack.enter_async_context(settings.client())
        follower = Follower(settings, record, root, life, mirror)
        _on_sigterm(follower.terminated.set)
        await follower.run()


@dataclass(frozen=True)
class NotingRetry(OutageRetry):
    """Calls ``on_success`` after each request that succeeds."""

    on_success: Callable[[], None] = lambda: None

    async def ask(
        self, question: Callable[[], Awaitable[_Answer]], but: Callable[[BdnError], bool] = lambda _: False
    ) -> _Answer:
        answer = await super().ask(question, but)
        self.on_success()
        return answer


@dataclass
class Follower:
    settings: PodSettings
    record: PodRecord
    root: Path
    life: Liveness
    mirror: MirrorClient
    patience_seconds: float = 3600.0  # a pod that is deleted has a minute more
    terminated: asyncio.Event = field(default_factory=asyncio.Event)  # the pod is deleted
    _over: asyncio.Event = field(default_factory=asyncio.Event)  # no process of the rank lives

    def __post_init__(self) -> None:
        self.directory = RunDirectory(_below(self.root, DIRECTORY))
        self._output = OutputSender(self.directory, self._send)
        self._limit = asyncio.timeout(None)

    async def run(self) -> None:
        await in_thread(self._output.load)
        try:
            with single_error():
                async with self._limit, asyncio.TaskGroup() as group:
                    group.create_task(self._output.send_all(self._over.is_set))
                    if self.record.checkpoints is not None and self.record.push_grant is not None:
                        group.create_task(
                            self._sync(_below(self.root, self.record.checkpoints), self.record.push_grant)
                        )
                    await self._watch()
                    self._over.set()
                    self._renew()
                    with suppress(BdnError):
                        await self._output.bound(is_end=True)
        except TimeoutError:
            waited = format_duration(self.patience_seconds)
            reason = (
                f"it took nothing for {waited} after the rank's end, and the rest of its output and checkpoints is lost"
            )
            raise ServiceUnreachableError(self.settings.url, reason) from None
        logger.info("rank ended, and everything is sent", extra={"run": self.record.run, "rank": self.record.rank})

    def _renew(self) -> None:
        """Wait for the mirror anew, after the rank's end, when it has taken something."""
        if self._over.is_set() and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + self.patience_seconds)

    async def _watch(self) -> None:
        """Until no process of the rank lives, or none has begun and none will."""
        while (life := self.life.look()) != "ENDED" and not (life == "AWAITED" and self.terminated.is_set()):
            with suppress(BdnError):
                if not self.directory.is_going and await in_thread(self._may_go):
                    await in_thread(self.directory.go)
                await self._output.bound()
            await asyncio.sleep(_LOOK_SECONDS)

    def _may_go(self) -> bool:
        with suppress(OSError):
            return _below(self.root, WANT).read_text().strip() == _GO
        return False

    async def _send(self, output: RunOutput) -> None:
        await self.mirror.record_run_output(self.record.run, self.record.rank, output)
        self._renew()

    async def _sync(self, checkpoints: Path, grant: str) -> None:
        syncing = opened_syncer(
            checkpoints,
            self.record.job,
            url=self.settings.url,
            token=grant,
            authorities=Authorities(self.settings.tls_ca),
            data_dir=self.directory.path,
            most_bytes=self.record.checkpoint_bytes,
            outages=NotingRetry(_log_outage, _POLICY, self._renew),
        )
        async with syncing as syncer:
            while not self._over.is_set():
                await self._try(partial(syncer.run, self._over), syncer)
            refused_until = asyncio.get_running_loop().time() + self.patience_seconds
            while not await self._try(syncer.run_once, syncer, refused_until):
                pass
        for name in syncer.left:
            why = syncer.reasons.get(name, "")
            logger.warning("checkpoint %a is not complete, and is lost with the pod: %a", name, why)

    async def _try(self, work: Callable[[], Awaitable[object]], syncer: Syncer, until: float = inf) -> bool:
        """Returns False after a failure and a minute's pause; raises the failure when another minute would be too late."""
        try:
            await work()
        except Exception as error:
            if asyncio.get_running_loop().time() + AGAIN_SECONDS > until:
                raise
            is_bug = not isinstance(error, BdnError)
            logger.warning(
                "cannot push checkpoints of %s; retrying in a minute: %s", syncer.job, error, exc_info=is_bug
            )
            await happens_within(AGAIN_SECONDS, asyncio.Event() if self._over.is_set() else self._over)
            return False
        return True
