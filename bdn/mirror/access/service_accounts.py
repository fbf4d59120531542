"""Callers with service-account tokens of Kubernetes: pods, for their namespace, and the agents of a cluster.

The signature alone is checked, and Kubernetes is not asked: a token stays good until it expires, also when its pod is
deleted.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jwt

from bdn.core.errors import BdnError, UnauthenticatedError
from bdn.mirror.access.callers import Caller, NotPermittedError
from bdn.mirror.access.clusters import KubernetesCluster
from bdn.mirror.access.issuer_keys import REFRESH_SECONDS, IssuerKeys, KeysUnavailableError
from bdn.mirror.db.waiting import repeated
from bdn.wire.access_schema import DEFAULT_ORGANISATION, Role

_LONGEST: Final = 16 * 1024  # bytes; a service account's token has about 1 KiB
_SKEW_SECONDS: Final = 30  # between the clocks of issuer and mirror
_CLAIMS: Final = "kubernetes.io"
_REQUIRED: Final = ["iss", "aud", "sub", "exp", _CLAIMS]


@dataclass(frozen=True, slots=True)
class _Pod:
    """What a token says of its pod. Raises ``ValueError`` where it says less."""

    namespace: str
    account: str
    uid: str

    @classmethod
    def of(cls, claims: Mapping[str, Any]) -> "_Pod":
        said = claims[_CLAIMS]
        if not isinstance(said, dict):
            raise ValueError(f"its claim {_CLAIMS} is not an object")  # noqa: TRY004 - a wrong value
        namespace, account = said.get("namespace"), _named(said, "serviceaccount", "name")
        if not isinstance(namespace, str) or claims["sub"] != f"system:serviceaccount:{namespace}:{account}":
            raise ValueError("its namespace and service account differ from its subject")
        if not _named(said, "pod", "name") or not (uid := _named(said, "pod", "uid")):
            raise ValueError(
                "it is bound to no pod: use the token that the kubelet gives to the driver or projects into a pod"
            )
        return cls(namespace, account, uid)


def _named(said: Mapping[str, Any], part: str, name: str) -> str:
    """The text of a claim; empty without it."""
    found = said.get(part)
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, str) else ""


class ServiceAccounts:
    """Verifies service-account tokens of the clusters of ``BDN_KUBERNETES``. One event loop."""

    def __init__(self, clusters: Mapping[str, KubernetesCluster], clock: Callable[[], float] = time.monotonic) -> None:
        """Blocking. Raises ``InvalidRequestError`` if a file of authorities cannot be used."""
        self._clusters = {name: (cluster, IssuerKeys(name, cluster, clock)) for name, cluster in clusters.items()}

    async def keep(self) -> None:
        """Read all keys now and then, until canceled."""
        async with asyncio.TaskGroup() as group:
            for _, keys in self._clusters.values():
                group.create_task(repeated(keys.refresh, REFRESH_SECONDS, "read keys"))

    async def caller(self, bearer: str) -> Caller | None:
        """The caller with this token; None if it is of none of the clusters.

        Raises:
            UnauthenticatedError: of a cluster, and not valid.
            StoreUnavailableError: the keys of its cluster cannot be read now.
        """
        if len(bearer) > _LONGEST or bearer.count(".") != 2:
            return None
        try:
            key_id = jwt.get_unverified_header(bearer).get("kid")
            issuer = jwt.decode_complete(bearer, options={"verify_signature": False})["payload"].get("iss")
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            return None
        named = [name for name, (cluster, _) in self._clusters.items() if cluster.issuer == issuer]
        if not named:
            return None
        if not isinstance(key_id, str):
            raise UnauthenticatedError("the service-account token names no key")
        return await self._caller_of_one(named, key_id, bearer)

    async def _caller_of_one(self, named: list[str], key_id: str, bearer: str) -> Caller:
        """The caller of one of these clusters: those that were set up alike have one issuer, and keys of their own.

        A cluster whose keys cannot be read neither delays nor refuses the tokens of another one.
        """
        known = [name for name in named if self._clusters[name][1].has(key_id)]
        refused: list[BdnError] = []
        for name in [*known, *(name for name in named if name not in known)]:
            cluster, keys = self._clusters[name]
            try:
                pod = _verified(bearer, cluster, await keys.find(key_id))
            except (UnauthenticatedError, KeysUnavailableError) as error:
                refused.append(error)
            else:
                return _caller(name, cluster, pod)
        unread = [error for error in refused if error.transient]
        raise unread[0] if unread and not known else refused[0]


def _verified(bearer: str, cluster: KubernetesCluster, key: jwt.PyJWK) -> _Pod:
    try:
        claims = jwt.decode(
            bearer,
            key,
            algorithms=[str(key.algorithm_name)],  # the key's own, whatever the header says
            audience=cluster.audience,
            issuer=cluster.issuer,
            leeway=_SKEW_SECONDS,
            options={"require": _REQUIRED},
        )
        return _Pod.of(claims)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UnauthenticatedError(
            f"the service-account token is refused: {str(error) or type(error).__name__}"
        ) from None


def _caller(name: str, cluster: KubernetesCluster, pod: _Pod) -> Caller:
    if f"{pod.namespace}/{pod.account}" == cluster.agents:
        return Caller(DEFAULT_ORGANISATION, Role.AGENT, cluster=name)
    if (place := cluster.place_of(name, pod.namespace)) is None:
        raise NotPermittedError(
            f"namespace {pod.namespace!r} of cluster {name!r} belongs to no organisation: the operator lists it in the "
            "file BDN_KUBERNETES, or gives the cluster an organisation there"
        )
    organisation, team = place
    return Caller(organisation, Role.POD, cluster=name, team=team, pod=pod.uid)
