"""The work of a stage, from a grant to files that its job can read. Read ``run`` from top to bottom."""

from collections.abc import Sequence
from dataclasses import dataclass

from bdn.core.chunk import Digest
from bdn.core.pace.rate_limit import TrafficClass
from node_agent.background_tasks import in_thread
from node_agent.cache.records import Held
from node_agent.disk.places import Places
from node_agent.fetch.fill_context import RetryBudget
from node_agent.fill.provision import FillRequest, Provision
from node_agent.stage.stage import NodeStage, StageProgress
from node_agent.stage.view.build import Built
from node_agent.stage.view.destination import Destination
from node_agent.stage.view.views import Views


@dataclass(frozen=True)
class Staging:
    """Does it. What can fail raises ``BdnError`` and leaves the clearing up to the caller, who holds the stage."""

    provision: Provision
    views: Views
    places: Places

    async def run(self, stage: NodeStage) -> None:
        """Let the manifests come onto this node, and the view appear."""
        record = stage.record

        def begin(held: Sequence[Held], missing: frozenset[Digest], budget: RetryBudget) -> StageProgress:
            return self._announce(stage, _by_mount(stage, held), missing, budget)

        request = FillRequest(list(record.manifests), record.grant, record.holder, TrafficClass.STAGE, begin)
        held = _by_mount(stage, await self.provision.run(request))
        if stage.is_mending and await in_thread(self._is_whole, stage, held):
            return  # it healed where it stands: a job that reads it shall not lose the folder under its feet
        await self._show(stage, held)

    def _is_whole(self, stage: NodeStage, mounts: Sequence[Held]) -> bool:
        record = stage.record
        if record.destination is not None or any(mount.exposure != self.views.kind for mount in record.mounts):
            return False
        manifests = {mount.mount_location: held.manifest for mount, held in zip(record.mounts, mounts, strict=True)}
        return self.views.is_intact(record.id, manifests)

    @staticmethod
    def _announce(
        stage: NodeStage, mounts: list[Held], missing: frozenset[Digest], budget: RetryBudget
    ) -> StageProgress:
        for record, held in zip(stage.record.mounts, mounts, strict=True):
            record.files_total = len(held.manifest.files)
            record.bytes_total = held.manifest.bytes_total
        progress = StageProgress([held.manifest for held in mounts], missing)
        stage.begin(progress, budget)
        return progress

    async def _show(self, stage: NodeStage, mounts: list[Held]) -> None:
        record = stage.record
        if record.destination is not None:
            destination = Destination(record.destination, record.id, self.places)
            manifest = mounts[0].manifest
            result, record.inode = await in_thread(destination.publish, manifest, stage.earlier, stage.stop)
            built = {mount.mount_location: result for mount in record.mounts}
        else:
            built = await self._show_mounts(stage, mounts)
        for mount in record.mounts:
            mount.view = built[mount.mount_location].kind
            mount.view_reason = built[mount.mount_location].reason
            mount.exposure = "none" if record.destination is not None else self.views.kind

    async def _show_mounts(self, stage: NodeStage, mounts: list[Held]) -> dict[str, Built]:
        manifests = {
            mount.mount_location: held.manifest for mount, held in zip(stage.record.mounts, mounts, strict=True)
        }
        if any(mount.exposure not in (None, self.views.kind) for mount in stage.record.mounts):
            await in_thread(self.views.drop, stage.record.id, list(manifests))  # exposed under other settings
        built = await in_thread(self.views.publish, stage.record.id, manifests, stage.stop)
        await in_thread(self.views.expose, stage.record.id, list(manifests))
        return built


def _by_mount(stage: NodeStage, held: Sequence[Held]) -> list[Held]:
    by_digest = {one.manifest.digest: one for one in held}
    return [by_digest[mount.digest] for mount in stage.record.mounts]
