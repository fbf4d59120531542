"""Connections of byte threads: resolve once, within a time; let the egress guard judge every answer; connect to those alone."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from bdn.core.egress.rules import EgressPolicy
from bdn.net.host_lookups import HOST_LOOKUPS, AddressInfo, Question


def resolve(host: str, port: int, timeout_seconds: float | None, policy: EgressPolicy | None) -> Sequence[AddressInfo]:
    """The addresses of a host in the resolver's order, every one of them allowed; all are without a policy. Blocking.

    Raises:
        EgressRefusedError: the host or one of its addresses is refused.
        OSError: the name does not resolve, or not in time.
    """
    asked = host if policy is None else policy.admit(host)
    found = HOST_LOOKUPS.find(Question(asked, port, kind=socket.SOCK_STREAM), timeout_seconds)
    if policy is not None:
        policy.admit_resolved(host, (str(info[4][0]) for info in found))
    return found


def dial(host: str, port: int, timeout_seconds: float | None, policy: EgressPolicy | None) -> socket.socket:
    """A connection to one of the host's addresses, tried in the resolver's order; the caller closes it.

    ``timeout_seconds`` are for the name, and for each address. Without a policy, every address is allowed.

    Certificates and ``Host`` headers go by the host as the caller knows it: neither is this function's business.

    Raises:
        EgressRefusedError: the host or one of its addresses is refused; nothing was sent to any of them.
        OSError: the name does not resolve, or no address answers (the last one's error).
    """
    failure = OSError("the name has no address")
    for family, kind, protocol, _, address in resolve(host, port, timeout_seconds, policy):
        try:
            return _connect(family, kind, protocol, address, timeout_seconds)
        except OSError as error:
            failure = error
    raise failure


def _connect(family: int, kind: int, protocol: int, address: Any, timeout_seconds: float | None) -> socket.socket:  # noqa: ANN401 - see AddressInfo
    with ExitStack() as stack:
        connection = stack.enter_context(socket.socket(family, kind, protocol))
        connection.settimeout(timeout_seconds)
        connection.connect(address)
        stack.pop_all()
    return connection
