"""The client for programs that use ``asyncio``."""

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from bdn.client.services import Services, agent_client, mirror_client
from bdn.client.staged import StagedFiles
from bdn.core.errors import BdnError, InvalidRequestError
from bdn.local.pull import pull_files
from bdn.local.pulled import Pull, Pulled
from bdn.net.client import OutageRetry
from bdn.net.waiting import outage_retry, ready_mirror
from bdn.settings import ClientSettings
from bdn.wire.mirror_schema import Mirror
from bdn.wire.named_sources import request_body
from bdn.wire.progress import Report
from bdn.wire.shapes import ReportedError, by_class
from bdn.wire.stage_schema import JobStage, StageView

logger = logging.getLogger("bdn.client")


@dataclass
class AsyncPendingMirror:
    """A mirror that was requested. ``latest`` is its last known state.

    Example::

        pending = await client.mirror(["hf://org/model"])
        mirror = await pending.wait()
    """

    latest: Mirror
    _services: Services

    @property
    def id(self) -> str:
        return self.latest.id

    async def wait(self, progress: Report | None = None) -> Mirror:
        """The mirror, READY. Raises the error with which it failed. It continues if the wait is canceled.

        An unreachable mirror is asked again for ten minutes, with a warning in the log.
        """
        with _errors_by_class():
            self.latest = await self._services.last_mirror(self.id, progress)
            return ready_mirror(self.latest)


class AsyncClient:
    """A mirror, and the agent of this machine, for ``asyncio``. Close it, or use it as a context.

    Arguments that are None are the settings of the commands: ``BDN_URL``, ``BDN_TOKEN``, ``BDN_ORGANISATION``,
    ``BDN_TLS_CA``, ``BDN_DATA_DIR``, ``BDN_AGENT_SOCKET``, or the file ``BDN_CONFIG``. ``progress`` of the methods is
    called with a ``Progress`` several times a second.

    Raises ``SettingsError``: a setting is invalid.

    Example::

        async with AsyncClient() as client:
            await client.pull("hf://org/model", "model")
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
        given: dict[str, Any] = {
            "url": url,
            "token": token,
            "organisation": organisation,
            "tls_ca": tls_ca,
            "data_dir": data_dir,
            "agent_socket": agent_socket,
        }
        self._settings = ClientSettings(**{name: value for name, value in given.items() if value is not None})
        self._services = Services(mirror_client(self._settings), agent_client(self._settings), _logged_outages)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._services.close()

    async def pull(
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
        """``bdn pull``: put the files of a source at a directory, verified, through a cache on this machine.

        Uses the services that run on ``BDN_DATA_DIR``, or its own, in this process. Canceled, it leaves no part of the
        files at the directory.

        With ``hub_cache`` instead of ``destination`` the files go into the cache of the hub's client below that
        directory, or with True where the client has it. Canceled, it leaves whole files there, and the client reports
        that others are missing.

        Example::

            pulled = await client.pull("hf://org/model", "model", allow=["*.safetensors", "*.json"])
        """
        with _errors_by_class():
            (wanted,) = request_body((source,), allow=tuple(allow), ignore=tuple(ignore), secret=secret).sources()
            if (destination is None) == (hub_cache is False):
                raise InvalidRequestError("name either a destination or hub_cache")
            if destination is not None:
                asked = Pull(wanted, Path(destination), offline=offline, replace=replace, link=link)
            elif replace or link:
                raise InvalidRequestError(
                    "replace and link are for a destination: hub_cache links, and removes nothing"
                )
            else:
                root = None if isinstance(hub_cache, bool) else Path(hub_cache)
                asked = Pull.into_hub_cache(wanted, root, offline=offline)
            return await pull_files(asked, self._settings, logger.info, progress)

    async def mirror(
        self,
        sources: Sequence[str],
        *,
        mounts: Sequence[str] = (),
        allow: Sequence[str] = (),
        ignore: Sequence[str] = (),
        secret: str | None = None,
    ) -> AsyncPendingMirror:
        """``bdn mirror``: request sources from the mirror. ``mounts`` are where a job sees them, in their order.

        Example::

            pending = await client.mirror(["hf://org/model"], mounts=["/app/model"])
        """
        with _errors_by_class():
            body = request_body(tuple(sources), tuple(mounts), tuple(allow), tuple(ignore), secret)
            return AsyncPendingMirror(await self._services.mirrors.request(body), self._services)

    @asynccontextmanager
    async def stage(
        self,
        mirror: Mirror | str,
        *,
        job: str,
        ttl_seconds: float | None = None,
        warm: bool = False,
        view: StageView = "files",
        progress: Report | None = None,
    ) -> AsyncIterator[StagedFiles]:
        """``bdn stage``: the files of a READY mirror on this node, released when the block ends, whatever ends it.

        ``mirror`` may be an id, or a checkpoint, ``bt://project@job/name``. ``ttl_seconds`` releases the files even if
        this program is killed. With ``view`` ``hub`` the path is a folder of the hub's cache. A job has one stage of the
        same content and view: the first block that ends releases it.

        Example::

            async with client.stage(mirror, job="train-42") as files:
                print(files.path)
        """
        name = mirror if isinstance(mirror, str) else mirror.id
        with _errors_by_class():
            begun = await self._services.begin_stage(
                name, job, ttl_seconds=ttl_seconds, warm=warm, view=view, report=progress
            )
        try:
            with _errors_by_class():
                files = StagedFiles.of(await self._services.last_stage(begun.id, progress))
            yield files
        except BaseException:
            with suppress(BdnError):
                await self._services.agent.unstage(begun.id)
            raise
        with _errors_by_class():
            await self._services.agent.unstage(begun.id)

    async def stages(self, job: str) -> list[JobStage]:
        """The stages of a job on all nodes, slowest first, as of each node's last heartbeat: every 10 s at least.

        Example::

            for stage in await client.stages("train-42"):
                print(stage.node, stage.state, stage.bytes_done, stage.bytes_total, stage.bytes_per_second)
        """
        with _errors_by_class():
            return (await self._services.mirrors.stages(job)).items


def _logged_outages(what: str) -> OutageRetry:
    return outage_retry(what, logger.info, logger.warning)


@contextmanager
def _errors_by_class() -> Iterator[None]:
    try:
        yield
    except ReportedError as error:
        raise by_class(error).with_traceback(error.__traceback__) from None
    except ValidationError as error:
        problems = "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors())
        raise InvalidRequestError(problems) from None
