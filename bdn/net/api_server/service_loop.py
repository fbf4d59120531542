"""The event loop of our programs: asyncio's own, which does not ask for names in the executor that all other work shares.

A client at a time could be taught the same, where it lets us. This way all of them are: ours, those of the upstreams, the
database's, and those that go by a proxy; each keeps its own way of trying the addresses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from bdn.net.host_lookups import HOST_LOOKUPS, AddressInfo, Question

_Result = TypeVar("_Result")


class ServiceLoop(asyncio.SelectorEventLoop):
    """A loop on which a name that does not resolve delays nobody but those who ask for it."""

    async def getaddrinfo(  # type: ignore[override]
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002 - asyncio's name
        proto: int = 0,
        flags: int = 0,
    ) -> list[AddressInfo]:
        """As of asyncio.

        Raises:
            NameSilentError: no answer in time.
            OSError: there is no address.
        """
        host = host.decode() if isinstance(host, bytes) else host
        port = port.decode() if isinstance(port, bytes) else port
        return await HOST_LOOKUPS.find_soon(Question(host, port, family, type, proto, flags))


def run_program(program: Coroutine[Any, Any, _Result]) -> _Result:
    """``asyncio.run`` on such a loop."""
    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        return runner.run(program)
