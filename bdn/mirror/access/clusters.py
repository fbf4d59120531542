"""The file ``BDN_KUBERNETES``: the Kubernetes clusters whose service-account tokens the mirror trusts, and for whom."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
    model_validator,
)

from bdn.core.errors import InvalidRequestError
from bdn.wire.access_schema import Line, Organisation, TeamName
from bdn.wire.http_fields import is_loopback

_SETTING: Final = "BDN_KUBERNETES"
_LARGEST: Final = 1024 * 1024  # bytes of the file: ten thousand namespaces
_PROBLEMS_NAMED: Final = 3
# With a namespace, which has no dot, the name makes a team that no other namespace has.
_CLUSTER: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_LABEL: Final = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"  # RFC 1123, as Kubernetes names namespaces
_SUBDOMAIN: Final = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"  # as Kubernetes names most objects
_ACCOUNT: Final = rf"^{_LABEL}/{_SUBDOMAIN}$"
_QUALIFIED: Final = rf"^({_SUBDOMAIN}/)?[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?$"  # of a label, or a resource
_LABEL_VALUE: Final = r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$"
_ACCOUNT_FOLDER: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # of each pod with a token


def _keys(text: str) -> str:
    """An address is https: a changed answer would make its sender the issuer."""
    if "://" in text and not _is_address(text, is_safe=True):
        raise ValueError("must be a file, or an https address without user and fragment")
    return text


def _api(text: str) -> str:
    if not _is_address(text, is_safe=True):
        raise ValueError("must be an https address without user and fragment")
    return text.rstrip("/")


def _url(text: str) -> str:
    if not _is_address(text, is_safe=False):
        raise ValueError("must be the http or https address at which pods reach the mirror")
    return text.rstrip("/")


def _is_address(text: str, *, is_safe: bool) -> bool:
    parts = urlsplit(text)
    in_clear = parts.scheme == "http" and (not is_safe or is_loopback(parts.hostname or ""))
    has_more = parts.fragment or "@" in parts.netloc
    return bool((parts.scheme == "https" or in_clear) and parts.hostname and not has_more)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Namespace(_Strict):
    """``team`` None: a team of the namespace's own; with ``jobs`` all of the organisation, since BDN makes its pods."""

    organisation: Organisation
    team: TeamName | None = None
    jobs: StrictBool = False


class GpuNodes(_Strict):
    """How the pods of a cluster request one type of GPU."""

    resource: Annotated[StrictStr, Field(pattern=_QUALIFIED)] = "nvidia.com/gpu"
    node_labels: dict[Annotated[str, Field(pattern=_QUALIFIED)], Annotated[StrictStr, Field(pattern=_LABEL_VALUE)]] = {}


class PodJobs(_Strict):
    """Training jobs of a cluster run as pods. ``image`` and ``url`` are for the containers that BDN adds to them."""

    image: Line
    url: Annotated[StrictStr, AfterValidator(_url)]
    url_ca: Annotated[StrictStr, Field(pattern=f"^{_SUBDOMAIN}$")] | None = (
        None  # ConfigMap with ca.crt; None: the image's
    )
    api: Annotated[StrictStr, AfterValidator(_api)] = "https://kubernetes.default.svc"
    ca: Path = _ACCOUNT_FOLDER / "ca.crt"
    token_file: Path = _ACCOUNT_FOLDER / "token"
    queue: Annotated[StrictStr, Field(pattern=f"^{_LABEL}$")] | None = None  # of Kueue
    cache_claim: Annotated[StrictStr, Field(pattern=f"^{_SUBDOMAIN}$")] | None = None  # of training caches
    gpus: dict[Line, GpuNodes] = {}  # by the type as jobs name it

    @model_validator(mode="after")
    def _check_url(self) -> PodJobs:
        if self.url_ca is not None and not self.url.startswith("https://"):
            raise ValueError("url_ca is for an https url")
        return self

    def gpu(self, kind: str) -> GpuNodes | None:
        return next((nodes for name, nodes in self.gpus.items() if name.upper() == kind.upper()), None)


class KubernetesCluster(_Strict):
    """One cluster: whose signature counts, and which organisation and team a namespace's pods act for."""

    issuer: Line
    audience: Line
    keys: Annotated[StrictStr, Field(min_length=1), AfterValidator(_keys)]  # JWKS: a file, or an address
    keys_ca: Path | None = None  # None trusts the system's authorities
    keys_token_file: Path | None = None  # sent to the address of the keys
    agents: Annotated[StrictStr, Field(pattern=_ACCOUNT)] | None = None  # namespace/name of their service account
    organisation: Organisation | None = None  # of namespaces that are not listed; None refuses their pods
    namespaces: dict[Annotated[str, Field(pattern=f"^{_LABEL}$")], Namespace] = {}
    jobs: PodJobs | None = None  # None: no pods are made in this cluster

    @model_validator(mode="after")
    def _check_jobs(self) -> KubernetesCluster:
        if self.jobs is None and self.job_namespaces:
            raise ValueError(f"namespaces.{self.job_namespaces[0]}.jobs needs a table jobs of the cluster")
        if self.jobs is not None and not self.job_namespaces:
            raise ValueError("jobs needs a namespace with jobs = true, in which pods are made")
        if self.agents is not None and self.agents.partition("/")[0] in self.job_namespaces:
            raise ValueError("agents may not be in a namespace with jobs = true, in which jobs name their images")
        return self

    @model_validator(mode="after")
    def _check_address(self) -> KubernetesCluster:
        given = [name for name in ("keys_ca", "keys_token_file") if getattr(self, name) is not None]
        if given and not self.is_at_address:
            raise ValueError(f"{given[0]} is for keys at an address, and keys is a file")
        return self

    @property
    def is_at_address(self) -> bool:
        return "://" in self.keys

    @property
    def job_namespaces(self) -> list[str]:
        return [name for name, namespace in self.namespaces.items() if namespace.jobs]

    def jobs_in(self, organisation: str, team: str) -> str | None:
        """The namespace for the jobs of a team: its own, else one of the whole organisation; None if there is none."""
        of_jobs = [
            (name, one) for name, one in self.namespaces.items() if one.jobs and one.organisation == organisation
        ]
        found = [name for wanted in (team, None) for name, one in of_jobs if one.team == wanted]
        return found[0] if found else None

    def place_of(self, cluster: str, namespace: str) -> tuple[str, str | None] | None:
        """Organisation and team of a namespace's pods; None if the file gives the namespace to no organisation.

        A namespace without a team in the file has the team ``cluster.namespace``: namespaces of one organisation do
        not see each other's mirrors. The name of a namespace alone would let its creator choose a team. Pods of a
        namespace of jobs act for the whole organisation: users do not make pods there.
        """
        own = f"{cluster}.{namespace}"
        if (listed := self.namespaces.get(namespace)) is not None:
            return listed.organisation, listed.team or (None if listed.jobs else own)
        return None if self.organisation is None else (self.organisation, own)


class _File(_Strict):
    clusters: Annotated[dict[Annotated[str, Field(pattern=_CLUSTER)], KubernetesCluster], Field(min_length=1)]


def load_clusters(file: Path) -> dict[str, KubernetesCluster]:
    """The clusters by name. Blocking. Raises ``InvalidRequestError``, one line that names the setting and the field."""
    try:
        with file.open("rb") as opened:
            content = opened.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise InvalidRequestError(f"{_SETTING}: {file} is larger than {_LARGEST} bytes")
        return _File.model_validate(tomllib.loads(content.decode())).clusters
    except OSError as error:
        raise InvalidRequestError(f"{_SETTING}: {file} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        found = error.errors(include_url=False)
        said = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found[:_PROBLEMS_NAMED]]
        said += [f"and {len(found) - len(said)} more"] if len(found) > len(said) else []
        raise InvalidRequestError(f"{_SETTING}: {file}: {'; '.join(said)}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{_SETTING}: {file} is not TOML: {error}") from None
