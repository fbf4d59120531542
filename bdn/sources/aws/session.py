"""A session of the AWS client that knows only what it is given: no profiles, files or roles of the machine, no redirects."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, Final

from aiobotocore.session import AioSession
from botocore.loaders import Loader

from bdn.sources.aws.guarded import GuardedSession

# In botocore's form: (name in a config file, environment variable, default, conversion).
_NOTHING_AMBIENT: Final = {
    "profile": (None, None, None, None),
    "config_file": (None, None, os.devnull, None),
    "credentials_file": (None, None, os.devnull, None),
}


def aws_session() -> AioSession:
    """A session for ``create_client``; cheap to make."""
    session = AioSession(session_vars=_NOTHING_AMBIENT)
    session.register_component("data_loader", _botocore_data())
    return session


class UnredirectedSession(GuardedSession):
    """HTTP for the client, in which a redirect is an answer like any other.

    aiohttp, following one, would take session tokens, and identity tokens in bodies, to another host.
    """

    async def _get_session(self, proxy_url: str | None) -> _WithoutRedirects:
        return _WithoutRedirects(await super()._get_session(proxy_url))


class _WithoutRedirects:
    def __init__(self, session: Any) -> None:  # noqa: ANN401 - aiohttp's, whose arguments are passed on as they come
        self._session = session

    async def request(self, method: str, **options: Any) -> Any:  # noqa: ANN401
        return await self._session.request(method, **options, allow_redirects=False)


@cache
def _botocore_data() -> Loader:
    """The client's descriptions of services, read once: they are most of the time that a client takes to make (80 of 100 ms)."""
    return Loader()
