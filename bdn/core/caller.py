"""Who calls the mirror, and for whom. Three roles, and one rule of who may act as what."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bdn.core.errors import UnauthenticatedError

DEFAULT_ORGANISATION: Final = "default"

# What may stand in a subject, in a session's name, in a header and in an external id alike: no ':', '=' or '*', with which
# one organisation's name could read like another one's, or like a pattern. Google allows a subject of 127 signs.
ORGANISATION_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


@dataclass(eq=False)
class NotPermittedError(UnauthenticatedError):
    """The token is good, but not for this: what is needed is another one. Says nothing of what exists."""


class Role(StrEnum):
    """What a token is good for."""

    OPERATOR = "operator"  # everything, for whatever organisation it names
    CONTROLLER = "controller"  # what its organisation mirrors, and nothing else
    AGENT = "agent"  # heartbeats, and nothing of tenants': agents read with the grants of their jobs


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody with a token, or anybody where authentication is off. ``cluster`` binds an agent's token to one cluster."""

    organisation: str
    role: Role
    cluster: str | None = None

    def acting(self, needed: Role, organisation: str | None) -> Caller:
        """The caller, for a call that needs this role and names this organisation (None: its own), or ``NotPermittedError``."""
        if self.role is Role.OPERATOR:
            return Caller(organisation or self.organisation, self.role)
        if self.role is not needed:
            raise NotPermittedError(f"a token of role {self.role} may not do this: it takes one of role {needed}")
        if organisation not in (None, self.organisation):
            raise NotPermittedError(
                "BDN-Organisation names another organisation than the token's; that takes an operator"
            )
        return self

    def check_cluster(self, cluster: str) -> None:
        """Refuse to speak for an agent of another cluster. Raises ``NotPermittedError``."""
        if self.cluster not in (None, cluster):
            raise NotPermittedError(f"this token is for agents of cluster {self.cluster!r} alone")
