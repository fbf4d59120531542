"""The client for programs that block: ``AsyncClient`` on an event loop of its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bdn.client.async_client import AsyncClient, AsyncPendingMirror
from bdn.client.loop_thread import LoopThread
from bdn.client.staged import StagedFiles
from bdn.local.pulled import Pulled
from bdn.wire.mirror_schema import Mirror
from bdn.wire.progress import Report
from bdn.wire.stage_schema import JobStage, StageView


@dataclass(frozen=True)
class PendingMirror:
    """A mirror that was requested.

    Example::

        mirror = client.mirror(["hf://org/model"]).wait()
    """

    _pending: AsyncPendingMirror
    _thread: LoopThread

    @property
    def id(self) -> str:
        return self._pending.id

    @property
    def latest(self) -> Mirror:
        """The last known state."""
        return self._pending.latest

    def wait(self, progress: Report | None = None) -> Mirror:
        """The mirror, READY. Raises the error with which it failed. It continues if the wait is interrupted."""
        return self._thread.run(self._pending.wait(progress))


class Client:
    """``AsyncClient`` for programs that block, and for several threads. Close it, or use it as a context.

    ``progress`` is called on the client's own thread, and must not call the client. An interrupt (Ctrl-C) cancels what
    the client does, and is raised once that has ended.

    Example::

        with Client() as client:
            client.pull("hf://org/model", "model")
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        organisation: str | None = None,
        tls_ca: str | Path | None = None,
        data_dir: str | Path | None = None,
        agent_socket: str | Path | None = None,
    ) -> None:
        self._client = AsyncClient(
            url, token, organisation=organisation, tls_ca=tls_ca, data_dir=data_dir, agent_socket=agent_socket
        )
        self._thread = LoopThread(self._client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._thread.close()

    def pull(
        self,
        source: str,
        destination: str | Path | None = None,
        *,
        allow: Sequence[str] = (),
        ignore: Sequence[str] = (),
        secret: str | None = None,
        offline: bool = False,
        replace: bool = False,
        link: bool = False,
        hub_cache: str | Path | bool = False,
        progress: Report | None = None,
    ) -> Pulled:
        """As ``AsyncClient.pull``.

        Example::

            pulled = client.pull("hf://org/model", "model", allow=["*.safetensors", "*.json"])
        """
        return self._thread.run(
            self._client.pull(
                source,
                destination,
                allow=allow,
                ignore=ignore,
                secret=secret,
                offline=offline,
                replace=replace,
                link=link,
                hub_cache=hub_cache,
                progress=progress,
            )
        )

    def mirror(
        self,
        sources: Sequence[str],
        *,
        mounts: Sequence[str] = (),
        allow: Sequence[str] = (),
        ignore: Sequence[str] = (),
        secret: str | None = None,
    ) -> PendingMirror:
        """As ``AsyncClient.mirror``.

        Example::

            mirror = client.mirror(["hf://org/model"], mounts=["/app/model"]).wait()
        """
        asked = self._client.mirror(sources, mounts=mounts, allow=allow, ignore=ignore, secret=secret)
        return PendingMirror(self._thread.run(asked), self._thread)

    @contextmanager
    def stage(
        self,
        mirror: Mirror | str,
        *,
        job: str,
        ttl_seconds: float | None = None,
        warm: bool = False,
        view: StageView = "files",
        progress: Report | None = None,
    ) -> Iterator[StagedFiles]:
        """As ``AsyncClient.stage``.

        Example::

            with client.stage(mirror, job="train-42") as files:
                print(files.path)
        """
        context = self._client.stage(mirror, job=job, ttl_seconds=ttl_seconds, warm=warm, view=view, progress=progress)
        with self._thread.inside(context) as files:
            yield files

    def stages(self, job: str) -> list[JobStage]:
        """As ``AsyncClient.stages``.

        Example::

            for stage in client.stages("train-42"):
                print(stage.node, stage.state, stage.eta_seconds)
        """
        return self._thread.run(self._client.stages(job))
