"""The direct connections of httpx2, behind the egress guard: for the session of ``huggingface_hub``.

httpx2 has no option for how a connection is made; the pool below it has one, ``network_backend``. A transport of ours with
such a pool takes the place of the default one, and nothing else changes: proxies of the environment keep theirs. Looking
at the peer's address after the answer, as its extensions allow, would come too late: the request has been sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ssl import SSLContext
from threading import Lock

import httpcore2
import httpx2

from bdn.core.egress.rules import EgressPolicy
from bdn.net.http1.dialing import resolve


class GuardedBackend(httpcore2.NetworkBackend):
    """Connects to checked addresses, never to a name."""

    def __init__(self, policy: EgressPolicy) -> None:
        self._policy = policy
        self._sockets = httpcore2.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        """A connection to the first address that answers; certificates go by the name all the same.

        Raises:
            EgressRefusedError: nothing was sent.
            httpcore2.ConnectError, httpcore2.ConnectTimeout: as of the default.
        """
        try:
            found = resolve(host, port, timeout, self._policy)
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error
        failure: Exception = httpcore2.ConnectError("the name has no address")
        for _, _, _, _, address in found:
            try:
                return self._sockets.connect_tcp(str(address[0]), port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure


class GuardedTransport(httpx2.HTTPTransport):
    """httpx2's own transport on a pool of guarded connections."""

    def __init__(self, policy: EgressPolicy, tls: SSLContext, limits: httpx2.Limits) -> None:
        super().__init__(verify=tls, limits=limits)
        # Closing the default pool also proves that it still has this name: a version without it must not go out unguarded.
        self._pool.close()
        self._pool = httpcore2.ConnectionPool(
            ssl_context=tls,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=GuardedBackend(policy),
        )


class DirectTransport(httpx2.BaseTransport):
    """Connections without a proxy, by the policy of the call that is being made; without a policy, as httpx2 makes them.

    Idle connections are kept apart by policy, so that none is reused under one that would not have made it.
    """

    def __init__(self, policy_of_call: Callable[[], EgressPolicy | None], limits: httpx2.Limits) -> None:
        self._policy_of_call = policy_of_call
        self._limits = limits
        self._tls = httpx2.create_ssl_context()
        self._unguarded = httpx2.HTTPTransport(verify=self._tls, limits=limits)
        self._guarded: dict[EgressPolicy, GuardedTransport] = {}
        self._lock = Lock()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """One request; a redirect is another one."""
        policy = self._policy_of_call()
        if policy is None:
            return self._unguarded.handle_request(request)
        with self._lock:
            if policy not in self._guarded:
                self._guarded[policy] = GuardedTransport(policy, self._tls, self._limits)
            transport = self._guarded[policy]
        return transport.handle_request(request)

    def close(self) -> None:
        """Close every idle connection."""
        self._unguarded.close()
        for transport in self._guarded.values():
            transport.close()
