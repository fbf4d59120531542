"""The file ``BDN_KUBERNETES``: the Kubernetes clusters whose service-account tokens the mirror trusts, and for whom."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictStr, ValidationError, model_validator

from bdn.core.errors import InvalidRequestError
from bdn.wire.access_schema import Line, Organisation, TeamName
from bdn.wire.http_fields import is_loopback

_SETTING: Final = "BDN_KUBERNETES"
_LARGEST: Final = 1024 * 1024  # bytes of the file: ten thousand namespaces
_PROBLEMS_NAMED: Final = 3
# With a namespace, which has no dot, the name makes a team that no other namespace has.
_CLUSTER: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_LABEL: Final = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"  # RFC 1123, as Kubernetes names namespaces
_ACCOUNT: Final = rf"^{_LABEL}/[a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?$"


def _keys(text: str) -> str:
    """An address is https: a changed answer would make its sender the issuer."""
    if "://" not in text:
        return text
    parts = urlsplit(text)
    is_safe = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
    if not is_safe or not parts.hostname or parts.fragment or "@" in parts.netloc:
        raise ValueError("must be a file, or an https address without user and fragment")
    return text


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Namespace(_Strict):
    """``team`` None: a team of the namespace's own."""

    organisation: Organisation
    team: TeamName | None = None


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

    @model_validator(mode="after")
    def _check_address(self) -> KubernetesCluster:
        given = [name for name in ("keys_ca", "keys_token_file") if getattr(self, name) is not None]
        if given and not self.is_at_address:
            raise ValueError(f"{given[0]} is for keys at an address, and keys is a file")
        return self

    @property
    def is_at_address(self) -> bool:
        return "://" in self.keys

    def place_of(self, cluster: str, namespace: str) -> tuple[str, str] | None:
        """Organisation and team of a namespace's pods; None if the file gives the namespace to no organisation.

        A namespace without a team in the file has the team ``cluster.namespace``: namespaces of one organisation do
        not see each other's mirrors. The name of a namespace alone would let its creator choose a team.
        """
        own = f"{cluster}.{namespace}"
        if (listed := self.namespaces.get(namespace)) is not None:
            return listed.organisation, listed.team or own
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
