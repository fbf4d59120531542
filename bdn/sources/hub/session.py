"""The HTTP session of ``huggingface_hub``, with one attempt and an end to waiting for the calls that we make.

Left alone, the SDK repeats a failed page of a listing up to five times with sleeps of its own, waits for an answer for
ever, and closes the shared session under other threads on a failed connection. Retries are the caller's here
(``core/pace/retry.py``), who alone knows how long an upstream asked to wait. The SDK has one session per process and one door
to it, ``set_client_factory``; calls outside :func:`one_attempt` behave as before.

Within it every request passes the egress guard, redirects included: the host as it is written in a hook that httpx2 calls
for each of them, by way of a proxy too, and the addresses that it resolves to where the connection is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from threading import Lock
from typing import Any, Final

import httpx2
from huggingface_hub import get_session, hf_raise_for_status, set_client_factory

from bdn.core.egress.rules import PUBLIC_INTERNET, EgressPolicy
from bdn.sources.hub.guarded import DirectTransport

PATIENCE: Final = {"connect": 10.0, "read": 60.0, "write": 60.0, "pool": 60.0}  # seconds, where the SDK names none
_REPEATED_BY_THE_SDK: Final = (408, 429, 500, 502, 503, 504)
_AGENT_REGISTRY: Final = "/api/agent-harnesses"

_egress: Final[ContextVar[EgressPolicy | None]] = ContextVar("_egress", default=None)  # None: the call is not ours
_installing: Final = Lock()


class HubUnreachableError(Exception):
    """The connection failed, before an answer or inside one. Not an httpx2 error, because the SDK repeats those."""


@contextmanager
def one_attempt(egress: EgressPolicy) -> Iterator[None]:
    """Within this, a call of the SDK makes each request once and fails at once, with a status or HubUnreachableError.

    Requests that the policy refuses fail with EgressRefusedError, which the SDK lets through.
    """
    with _installing:
        _install()
    token = _egress.set(egress)
    try:
        yield
    finally:
        _egress.reset(token)


def warm_up() -> None:
    """Make the session now: loading certificates takes a tenth of a second, which the first request need not wait for."""
    with one_attempt(PUBLIC_INTERNET):
        get_session()


@cache
def _install() -> None:
    hooks = get_session().event_hooks  # the SDK's own: offline mode, request ids
    hooks = {**hooks, "request": [*hooks.get("request", ()), _judge]}
    # Built as the SDK builds it, without ``transport=``: one given would switch HTTPS_PROXY off.
    set_client_factory(lambda: _Session(event_hooks=hooks, follow_redirects=True, timeout=None))


def _judge(request: httpx2.Request) -> None:
    if egress := _egress.get():
        egress.admit(request.url.raw_host.decode("ascii"))


class _Session(httpx2.Client):
    # The options are passed on as they come; the names of their types are private to httpx2.
    def __init__(self, **options: Any) -> None:  # noqa: ANN401
        super().__init__(**options)
        if not isinstance(self._transport, DirectTransport):
            msg = "this version of httpx2 makes its connections in another way; the egress guard does not know it"
            raise TypeError(msg)

    def _init_transport(self, *_: Any, **options: Any) -> httpx2.BaseTransport:  # noqa: ANN401
        return DirectTransport(_egress.get, options["limits"])

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:  # noqa: ANN401
        if _egress.get() is None:
            return super().send(request, **options)
        if request.url.path == _AGENT_REGISTRY:
            # Telemetry, and sent to the SDK's idea of the endpoint, which need not be the one that we were given.
            return httpx2.Response(404, request=request)
        named = {name: limit for name, limit in request.extensions.get("timeout", {}).items() if limit is not None}
        request.extensions = {**request.extensions, "timeout": {**PATIENCE, **named}}
        try:
            response = super().send(request, **options)
        except httpx2.TransportError as error:
            raise HubUnreachableError(f"{request.url.host}: {type(error).__name__}: {error}".rstrip(": ")) from error
        if response.status_code in _REPEATED_BY_THE_SDK:
            hf_raise_for_status(response)
        return response
