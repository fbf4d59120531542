"""``bdn truss``: the unmodified client of Baseten against our mirror.

truss takes the address of its API from a fixed table. Only ``http://localhost:8000`` leads to plain HTTP there, at
``http://api.localhost:8000``; a forwarder on loopback sends both names to the mirror.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import click

from bdn.cli.output import Output, command_line
from bdn.core.errors import InvalidRequestError
from bdn.net.forwarder import Forwarder
from bdn.net.tls import Authorities
from bdn.settings import ClientSettings
from bdn.wire.http_fields import ORGANISATION_HEADER

REMOTE_URL: Final = "http://localhost:8000"
NAMES: Final = ("localhost:8000", "api.localhost:8000")
# A NO_PROXY that names localhost would send truss past the forwarder, to a port on which nothing listens.
_REMOVED: Final = ("NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy")


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="ARGS...")
@command_line
async def truss(output: Output, *, arguments: Sequence[str]) -> int:
    """Run truss, the client of Baseten, with ARGS against the mirror of BDN_URL.

    The truss of PATH runs unmodified, with the token of BDN_TOKEN; its exit code is the command's.

    \b
    Example: bdn truss train push config.py --tail
    Example: bdn truss train logs --job-id 0a1b2c3d4e
    """
    settings = ClientSettings()
    program = shutil.which("truss")
    if program is None:
        raise InvalidRequestError("no truss in PATH: install it with 'pip install truss', in an environment of its own")
    headers = {ORGANISATION_HEADER: settings.organisation} if settings.organisation else {}
    forwarder = Forwarder(settings.url, NAMES, headers, Authorities(settings.tls_ca), output.error)
    async with forwarder.listening() as proxy:
        environment = environment_of(os.environ, proxy, settings.token)
        started = asyncio.get_running_loop().create_future()
        with _signals_go_to(started):
            process = await asyncio.create_subprocess_exec(program, *arguments, env=environment)
            started.set_result(process)
            code = await process.wait()
    return code if code >= 0 else 128 - code


def environment_of(environ: Mapping[str, str], proxy: str, token: str | None) -> dict[str, str]:
    """The environment of truss: its remote, its key, and the forwarder as the proxy for http."""
    kept = {name: value for name, value in environ.items() if name not in _REMOVED}
    remote = {"BASETEN_TRUSS_AUTH_REMOTE_URL": REMOTE_URL, "BASETEN_TRUSS_AUTH_API_KEY": token or "off"}
    return {**kept, **remote, "HTTP_PROXY": proxy, "http_proxy": proxy}


@contextmanager
def _signals_go_to(started: asyncio.Future[asyncio.subprocess.Process]) -> Iterator[None]:
    """Inside the context, truss decides when it ends: a terminal sends Ctrl-C to both, and SIGTERM is passed on.

    A SIGTERM that arrives before truss has started is passed on once it has.
    """
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    pass_on = partial(started.add_done_callback, lambda done: done.result().terminate())
    loop.add_signal_handler(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
