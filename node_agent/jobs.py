"""What jobs get: stages, the views in which they see their files, and who looks after both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from node_agent.background_tasks import BackgroundTasks, in_thread
from node_agent.cache.node_cache import Clock
from node_agent.fill.provision import Provision
from node_agent.ground import Ground
from node_agent.stage.housekeeping import Housekeeping
from node_agent.stage.lifecycle import Lifecycle
from node_agent.stage.pulls import Pulls
from node_agent.stage.record import StageRecords
from node_agent.stage.stage import StageBook
from node_agent.stage.stages import Stages
from node_agent.stage.staging import Staging
from node_agent.stage.view.exposure import choose, exposures
from node_agent.stage.view.views import Views
from node_agent.stage.warm import Warmer


@dataclass(frozen=True)
class Jobs:
    """``background`` works on stages, and on whatever else somebody asked for."""

    book: StageBook
    background: BackgroundTasks
    views: Views
    records: StageRecords
    pulls: Pulls
    lifecycle: Lifecycle
    housekeeping: Housekeeping

    def let_go(self) -> None:
        """Before tasks are canceled: threads that copy shall notice, so that nobody waits for them."""
        for stage in self.book.all():
            stage.stop.set()


async def open_jobs(stack: AsyncExitStack, ground: Ground, provision: Provision, elapsed: Clock) -> Jobs:
    """Nothing is resumed yet. ``elapsed`` counts the seconds that leases have left."""
    settings, book, places, clock = ground.settings, ground.book, ground.disk.places, ground.clock
    views = Views(places, exposures(places), await in_thread(choose, settings.exposure, places))
    records, pulls = StageRecords(places), Pulls(book, ground.manifests, places)
    background = await stack.enter_async_context(BackgroundTasks())
    lifecycle = Lifecycle(
        background,
        Staging(provision, views, places),
        Warmer(background, book, views, settings.warm_rate),
        cache=ground.cache,
        views=views,
        records=records,
        pulls=pulls,
        clock=clock,
        elapsed=elapsed,
        on_ready=ground.metrics.ready,
        on_change=ground.news.tell,
        decided=ground.journal.record,
    )
    housekeeping = Housekeeping(
        book,
        lifecycle,
        records,
        ground.manifests,
        ground.cache,
        ground.tier,
        views,
        pulls,
        clock,
        ground.disk.is_rebooted,
    )
    return Jobs(book, background, views, records, pulls, lifecycle, housekeeping)


def stages_of(ground: Ground, jobs: Jobs, ask_for_keys: Callable[[], Awaitable[None]]) -> Stages:
    """What people and commands talk to. ``ask_for_keys`` is awaited when a grant is signed with an unknown one."""
    is_node = "node" in ground.settings.roles
    return Stages(
        jobs.book,
        jobs.lifecycle,
        jobs.records,
        jobs.views,
        jobs.pulls,
        ground.trust,
        ask_for_keys,
        ground.clock,
        is_node,
    )
