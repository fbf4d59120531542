"""``bdn serve``, ``bdn worker``, ``bdn migrate`` and ``bdn up``: services in the foreground."""

import click

from bdn.cli.output import Output, command_line
from bdn.cli.running import in_the_foreground
from bdn.core.errors import InvalidRequestError
from bdn.disk.durable import disk_errors
from bdn.local.services import running_mirror, running_services, told
from bdn.mirror.api.routes import probes_router
from bdn.mirror.app import open_mirror
from bdn.mirror.db.database import Database, database_url, place_of
from bdn.mirror.db.recall import HEAD
from bdn.mirror.settings import MirrorSettings
from bdn.net.api_server import serving_probes
from bdn.wire.access_schema import DEFAULT_ORGANISATION


@click.command()
@click.option("--host", help="Address to listen on; default: BDN_HOST.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port of the API; default: BDN_PORT. 0 selects a free port."
)
@click.option("--data-port", type=click.IntRange(0, 65535), help="Port of the data plane; default: BDN_DATA_PORT.")
@command_line
async def serve(output: Output, **options: object) -> None:
    """Run the mirror: its API, a worker and the data plane.

    \b
    Example: BDN_DATA_DIR=/var/lib/bdn bdn serve --port 8460
    """
    given = {name: value for name, value in options.items() if value is not None}
    settings = MirrorSettings(**given)  # type: ignore[arg-type] # checked by the settings
    async with in_the_foreground(settings, "bdn-mirror") as stop, running_mirror(settings) as mirror:
        output.result(
            {"url": mirror.url, "data_port": mirror.service.data_port},
            [
                f"mirror at {mirror.url} (documentation at {mirror.url}/docs), data plane on port {mirror.service.data_port}"
            ],
        )
        with mirror.for_pulls():
            await stop.wait()


@click.command()
@command_line
async def worker(output: Output) -> None:
    """Run an additional worker for a mirror on PostgreSQL. It opens no port, but for BDN_WORKER_METRICS.

    \b
    Example: BDN_DATABASE_URL=postgresql://bdn@db/bdn bdn worker
    """
    settings = MirrorSettings()
    if settings.is_embedded:
        raise InvalidRequestError(
            "the embedded database serves one process, and 'bdn serve' includes a worker; for more workers set BDN_DATABASE_URL"
        )
    async with (
        in_the_foreground(settings, "bdn-worker") as stop,
        open_mirror(settings, serve=False) as service,
        serving_probes(settings.worker_metrics, probes_router, (service.metrics,)) as probes,
    ):
        output.say("working")
        with told(settings, "worker", {"metrics": f"{probes}/metrics"} if probes else {}):
            await stop.wait()


@click.command()
@command_line
async def migrate(output: Output) -> None:
    """Migrate the database to this version's schema.

    \b
    Example: BDN_DATABASE_URL=postgresql://bdn@db/bdn bdn migrate
    """
    settings = MirrorSettings()
    if settings.is_embedded:
        with disk_errors(settings.data_dir):
            settings.data_dir.mkdir(parents=True, exist_ok=True)
    database = Database(settings.effective_database_url)
    place = place_of(database_url(settings.effective_database_url))
    try:
        before = await database.version()
        await database.migrate()
    finally:
        await database.close()
    document = {"database": place, "before": before, "now": HEAD}
    output.result(document, [f"database {place} at migration {HEAD} (was {before or 'empty'})"])


@click.command()
@command_line
async def up(output: Output) -> None:
    """Run a mirror and an agent on this machine until interrupted, and print their addresses.

    Mounts of stages and job volumes stay in place for their jobs; the last lines name the commands that remove them.

    \b
    Example: bdn up &
    """
    settings = MirrorSettings()
    if "gateway_organisation" not in settings.model_fields_set:
        settings = settings.model_copy(update={"gateway_organisation": DEFAULT_ORGANISATION})
    serving = running_services(settings, program="bdn up", serve=True)
    async with in_the_foreground(settings, "bdn-up") as stop, serving as (mirror, agent):
        output.result(
            {
                "mirror": mirror.url,
                "data_port": mirror.service.data_port,
                "agent": agent.address,
                "gateway": agent.gateway or None,
            },
            [
                f"mirror at {mirror.url} (documentation at {mirror.url}/docs)",
                f"agent at {agent.address}",
                *([f"hub gateway at {agent.gateway} (set HF_ENDPOINT to it)"] if agent.gateway else []),
            ],
        )
        with mirror.for_pulls():
            await stop.wait()
        if mounted := await agent.mounted():
            output.say("still mounted for the jobs of stages and volumes:")
            for path in mounted:
                output.say(f"  {path}")
            output.say("to remove them: start 'bdn up' again, then 'bdn unstage --all' and 'bdn volumes rm --all'")
