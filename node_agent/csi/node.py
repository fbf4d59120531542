"""Publishing and unpublishing: a mirror is waited for, a stage, and its view is mounted; and all of it is taken back."""

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from grpc import StatusCode

from bdn.core.errors import BdnError, CanceledError, InternalError, InvalidRequestError, MountFailedError
from bdn.disk.threads import in_thread
from bdn.net.api_clients import AgentClient, MirrorClient
from bdn.wire.mirror_schema import TERMINAL as MIRROR_TERMINAL
from bdn.wire.mirror_schema import Mirror
from bdn.wire.shapes import ReportedError
from bdn.wire.stage_schema import TERMINAL as STAGE_TERMINAL
from bdn.wire.stage_schema import StageDocument, StageMount, StageRequest
from node_agent.csi.protocol.csi_pb2 import NodePublishVolumeRequest, NodeUnpublishVolumeRequest
from node_agent.csi.refusal import Refusal, mirroring, staging
from node_agent.csi.settings import CsiSettings
from node_agent.csi.target import Target, opened_view, uid_of
from node_agent.csi.volume import PodVolume
from node_agent.csi.waiting import Call, Calls

logger = logging.getLogger(__name__)
_POLL_SECONDS: Final = 4.0  # the kubelet gets figures of this age at most


@dataclass(frozen=True)
class NodeVolumes:
    """Nothing is kept between two calls: the stages of the agent and the mounts of this node say what there is.

    ``mirror`` makes a client for a token.
    """

    settings: CsiSettings
    agent: AgentClient
    mirror: Callable[[str | None], MirrorClient]
    calls: Calls = field(default_factory=Calls)

    async def publish(self, request: NodePublishVolumeRequest, seconds_left: float | None) -> Refusal | None:
        """Returns None once the pod may read the whole volume at its target."""
        try:
            target = Target.parse(request.target_path, self.settings.kubelet_dir)
        except BdnError as error:
            return Refusal.of(error)
        async with self.calls.alone(target.path) as call:
            refusal = await self._published(request, target, call, seconds_left)
            if refusal is not None and refusal.is_final:
                try:
                    await self._take_back(target)
                except BdnError as error:  # not final: the kubelet calls again, or unpublishes
                    text = f"{refusal.text}; and cannot be cleaned up: {Refusal.of(error).text}"
                    refusal = Refusal(StatusCode.UNAVAILABLE, text)
        if refusal is not None:
            facts = {"volume": request.volume_id, "target": str(target.path), "status": refusal.status.name}
            logger.warning("volume not published: %s", refusal.text, extra=facts)
        return refusal

    async def unpublish(self, request: NodeUnpublishVolumeRequest) -> Refusal | None:
        try:
            target = Target.parse(request.target_path, self.settings.kubelet_dir)
            async with self.calls.alone(target.path):
                await self._take_back(target)
        except BdnError as error:
            logger.warning("volume not unpublished: %s", error, extra={"volume": request.volume_id})
            return Refusal.of(error)
        logger.info("volume unpublished", extra={"volume": request.volume_id, "target": str(target.path)})
        return None

    async def release_abandoned(self) -> None:
        """Release the stages of volumes whose pod's directory is gone: nothing will unpublish them."""
        try:
            stages = await Call().ask(self._open_stages)
            pods = await in_thread(partial(os.listdir, self.settings.kubelet_dir / "pods"))
            for stage in stages:
                uid = uid_of(stage.job_id)
                if uid is not None and uid not in pods:
                    await self._unstage(stage.id)
                    logger.info("released the stage of a pod that is gone", extra={"stage": stage.id, "pod": uid})
        except (BdnError, OSError) as error:
            logger.warning("cannot release stages of pods that are gone: %s; the next start retries", error)

    async def _published(
        self, request: NodePublishVolumeRequest, target: Target, call: Call, seconds_left: float | None
    ) -> Refusal | None:
        try:
            await in_thread(target.make)
            stage = await call.hold(seconds_left, self._mounted(request, target, call))
        except BdnError as error:
            return Refusal.of(error)
        if stage is None:
            return call.refusal()
        facts = {"volume": request.volume_id, "stage": stage.id, "job": stage.job_id, "target": str(target.path)}
        logger.info("volume published", extra=facts)
        return None

    async def _mounted(self, request: NodePublishVolumeRequest, target: Target, call: Call) -> StageDocument:
        """Mount a stage of this volume for a grant of now, unless one is mounted.

        A kubelet that restarts publishes the volumes of running pods again: they stay, whatever of the request the driver,
        the CSIDriver or the mirror would refuse by now.
        """
        others = await call.ask(partial(self._stages_of, target))
        for stage in others:
            if stage.state == "READY" and await in_thread(partial(self._is_shown, target, stage)):
                return stage
        volume = PodVolume.parse(request, target, needs_token=self.settings.auth == "token")
        call.source = volume.named
        if note := await in_thread(target.empty):
            logger.warning("%s", note)
        mirror = await self._mirrored(volume, call)
        ready = await self._staged(volume, str(mirror.grant), call)
        # A branch that moved since an earlier call: its stage would keep its lease for as long as the pod runs.
        for stage in others:
            if stage.id != ready.id:
                await self._unstage(stage.id)
        await in_thread(partial(self._show, volume, ready))
        return ready

    async def _mirrored(self, volume: PodVolume, call: Call) -> Mirror:
        call.step = "waiting for the mirror"
        async with self.mirror(volume.token) as client:
            first = partial(client.mirror, volume.mirror_id, mount=volume.mount)
            mirror = await call.ask(partial(client.request, volume.request) if volume.request else first)
            while mirror.status not in MIRROR_TERMINAL:
                call.step = mirroring(mirror)
                mirror = await call.ask(partial(client.mirror, mirror.id, _POLL_SECONDS, volume.mount))
        if mirror.status != "READY":
            raise ReportedError(mirror.error) if mirror.error else CanceledError(f"mirror {mirror.id}")
        if len(mirror.sources) != 1:
            named = f"mirror {mirror.id} has {len(mirror.sources)} sources"
            raise InvalidRequestError(f"{named}, and a volume shows one: give the mountLocation of one of them")
        if mirror.grant is None:
            raise InternalError(f"mirror {mirror.id} is READY and has no grant")
        return mirror

    async def _staged(self, volume: PodVolume, grant: str, call: Call) -> StageDocument:
        call.step = "waiting for the agent of this node"
        request = StageRequest(job_id=volume.job_id, grant=grant, view=volume.view)
        stage = await call.ask(partial(self.agent.stage, request))
        while stage.state not in STAGE_TERMINAL:
            call.step = staging(stage)
            stage = await call.ask(partial(self.agent.stage_by_id, stage.id, _POLL_SECONDS))
        if stage.state != "READY" or stage.error:  # READY with an error: files were lost and not fetched again
            raise ReportedError(stage.error) if stage.error else CanceledError(f"stage {stage.id}")
        return stage

    def _show(self, volume: PodVolume, stage: StageDocument) -> None:
        mount = _only_mount(stage)
        if mount.exposure != "none":
            raise MountFailedError(
                mount.path, f"the agent exposes stages by {mount.exposure}: set BDN_AGENT_EXPOSURE=none for it"
            )
        with opened_view(self.settings.effective_mounts_dir, stage.id, mount.path) as view:
            volume.target.show(view, is_read_only=volume.is_read_only)

    def _is_shown(self, target: Target, stage: StageDocument) -> bool:
        try:
            with opened_view(self.settings.effective_mounts_dir, stage.id, _only_mount(stage).path) as view:
                return target.shows(view)
        except MountFailedError:
            return False

    async def _take_back(self, target: Target) -> None:
        """Unmount, release and remove. Idempotent. Raises ``BdnError``: some of it is left; call again."""
        if note := await in_thread(target.clear):
            logger.warning("%s", note)
        for stage in await self._stages_of(target):
            await self._unstage(stage.id)

    async def _stages_of(self, target: Target) -> list[StageDocument]:
        return [stage for stage in await self._open_stages() if target.has(stage.job_id)]

    async def _open_stages(self) -> Iterable[StageDocument]:
        return [stage for stage in (await self.agent.stages()).items if stage.state != "RELEASED"]

    async def _unstage(self, stage_id: str) -> None:
        try:
            await self.agent.unstage(stage_id)
        except BdnError as error:
            if error.code != "NOT_FOUND":
                raise


def _only_mount(stage: StageDocument) -> StageMount:
    if len(stage.mounts) != 1:
        raise MountFailedError(stage.id[:100], f"the agent names {len(stage.mounts)} mounts of a volume's stage")
    return stage.mounts[0]
