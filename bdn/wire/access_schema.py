"""Tokens of the mirror, and secrets of upstreams, which can be set but never read back."""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr

from bdn.core.errors import InvalidRequestError, LimitExceededError
from bdn.wire.shapes import Items, StrictModel, json_object

DEFAULT_ORGANISATION: Final = "default"
DEFAULT_TEAM: Final = "Default"  # every organisation has it

# Characters that are valid in a subject, a session name, a header and an external id alike: no ':', '=' or '*', with
# which one organisation's name could read like another's, or like a pattern. Google allows a subject of 127 characters.
ORGANISATION_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
TEAM_PATTERN: Final = r"[A-Za-z0-9]([A-Za-z0-9 ._-]{0,126}[A-Za-z0-9._-])?"


class Role(StrEnum):
    """What a token allows."""

    OPERATOR = "operator"  # everything, for any organisation that a request names
    CONTROLLER = "controller"  # mirrors of its organisation, and nothing else
    AGENT = "agent"  # heartbeats, and no data of tenants: agents read with the grants of their jobs
    POD = "pod"  # a pod of Kubernetes: mirrors of its namespace; no token of the mirror's own has this role


LONGEST_SECONDS: Final = 100 * 365 * 24 * 3600
Line = Annotated[StrictStr, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
Organisation = Annotated[StrictStr, Field(pattern=f"^{ORGANISATION_PATTERN}$")]
TeamName = Annotated[StrictStr, Field(pattern=f"^{TEAM_PATTERN}$")]


class TokenRequest(
    StrictModel,
    json_schema_extra={"examples": [{"name": "job controller", "organisation": "research", "role": "controller"}]},
):
    """A token to be made. ``name`` is a label; ``expires_seconds`` null means until it is revoked.

    ``cluster`` is for the role ``agent`` and limits the token to agents of this cluster. ``team`` is for the role
    ``controller`` and limits the token to this team.
    """

    name: Line
    organisation: Organisation
    role: Role
    cluster: Line | None = None
    team: TeamName | None = None
    expires_seconds: Annotated[int, Field(gt=0, le=LONGEST_SECONDS)] | None = None

    def check(self) -> None:
        """Reject a request whose parts contradict each other."""
        if self.role is Role.POD:
            raise InvalidRequestError(
                "pods have the service-account tokens of their Kubernetes cluster, which BDN_KUBERNETES names; make no token for them"
            )
        if self.cluster is not None and self.role is not Role.AGENT:
            raise InvalidRequestError(f"cluster is for tokens of role agent, and this one is for a {self.role}")
        if self.team is not None and self.role is not Role.CONTROLLER:
            raise InvalidRequestError(f"team is for tokens of role controller, and this one is for an {self.role}")


class Token(BaseModel):
    """A token, without its value: the mirror stores only the value's SHA-256."""

    id: str
    name: str
    organisation: str
    role: Role
    cluster: str | None
    team: str | None = None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class NewToken(Token):
    """A token that was just made. ``token`` cannot be shown again."""

    token: str = Field(repr=False)


class TeamRequest(StrictModel, json_schema_extra={"examples": [{"name": "research"}]}):
    name: TeamName


class Team(BaseModel):
    """A team of an organisation, which owns projects. Its name is unique in the organisation and never changes."""

    id: str
    name: str
    created_at: datetime


NAME_PATTERN: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
LIMIT_VALUE_BYTES: Final = 64 * 1024
_NO_TEXT: Final = re.compile("[\0\ud800-\udfff]")


class SecretBody(StrictModel, json_schema_extra={"examples": [{"value": "hf_example"}]}):
    """The value of a secret to set: a token, or a JSON object with keys."""

    model_config = ConfigDict(hide_input_in_errors=True)

    value: Annotated[StrictStr, Field(max_length=64 * LIMIT_VALUE_BYTES)] = Field(repr=False)

    def check(self) -> None:
        """Reject a value that cannot open any upstream. Whether it opens one is only known when it is used."""
        if (size := len(self.value.encode(errors="surrogatepass"))) > LIMIT_VALUE_BYTES:
            raise LimitExceededError("bytes of the secret", size, LIMIT_VALUE_BYTES)
        if not self.value.strip():
            raise InvalidRequestError("the secret's value is empty")
        if _NO_TEXT.search(self.value):
            raise InvalidRequestError("the secret's value is not text")
        if self.value.lstrip().startswith("{") and json_object(self.value) is None:
            raise InvalidRequestError("the secret's value begins like a JSON object, and is not valid JSON")


class SecretEntry(BaseModel):
    """A secret, without its value.

    ``sealed_with`` names the mirror's key that opens it; ``outranked``: the operator's environment or directory
    contains the same name, and takes precedence.
    """

    name: str
    created_at: datetime
    updated_at: datetime
    sealed_with: Literal["first key", "older key", "unknown key"]
    outranked: bool


class SecretRotation(Items[SecretEntry]):
    """``others_left``: how many secrets of other organisations remain under keys that the mirror does not have.

    Null: only the caller's organisation was scanned, and the older keys may still be needed.
    """

    others_left: int | None = None


def is_secret_name(name: str) -> bool:
    """Whether the name is valid as the end of a variable's name, as a file name and as a key of a row."""
    return re.fullmatch(NAME_PATTERN, name) is not None
