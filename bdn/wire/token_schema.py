"""Tokens: what callers show. The token itself is in one answer only, the one that made it."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, StrictStr

from bdn.core.caller import ORGANISATION_PATTERN, Role
from bdn.core.errors import InvalidRequestError

LONGEST_SECONDS: Final = 100 * 365 * 24 * 3600
Line = Annotated[StrictStr, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
Organisation = Annotated[StrictStr, Field(pattern=f"^{ORGANISATION_PATTERN}$")]


class TokenRequest(BaseModel):
    """A token to be made. ``name`` is for people; ``expires_seconds`` null means until it is revoked.

    ``cluster`` is for the role ``agent``: then the token speaks for agents of this cluster alone.
    """

    model_config = ConfigDict(extra="forbid")

    name: Line
    organisation: Organisation
    role: Role
    cluster: Line | None = None
    expires_seconds: Annotated[int, Field(gt=0, le=LONGEST_SECONDS)] | None = None

    def check(self) -> None:
        """Refuse a request whose parts contradict each other."""
        if self.cluster is not None and self.role is not Role.AGENT:
            raise InvalidRequestError(f"cluster is for tokens of role agent, and this one is for a {self.role}")


class Token(BaseModel):
    """A token, without itself: it is known by its SHA-256 alone."""

    id: str
    name: str
    organisation: str
    role: Role
    cluster: str | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class NewToken(Token):
    """A token that was just made. Nobody can show ``token`` again."""

    token: str = Field(repr=False)


class Tokens(BaseModel):
    """All tokens of all organisations, newest last."""

    items: list[Token]
