"""Callers of the mirror, and what their role lets them do."""

from __future__ import annotations

from dataclasses import dataclass

from bdn.core.errors import UnauthenticatedError
from bdn.wire.access_schema import Role


class NotPermittedError(UnauthenticatedError):
    """The token is valid, but not for this request. Reveals nothing of what exists."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The bearer of a token; any client if authentication is off. ``cluster`` binds the token of an agent or pod to one cluster.

    ``pod`` is a pod's uid. Only pods of training jobs have no team. A caller of a ``team`` sees only what that team has;
    None: all of the organisation.
    """

    organisation: str
    role: Role
    cluster: str | None = None
    team: str | None = None
    pod: str | None = None

    def acting(self, needed: Role, organisation: str | None) -> Caller:
        """The caller, acting in this role for this organisation (None: its own). Raises ``NotPermittedError``."""
        if self.role is Role.OPERATOR:
            return Caller(organisation or self.organisation, self.role)
        if self.role is not needed:
            raise NotPermittedError(f"a token of role {self.role} may not do this: use a token of role {needed}")
        if organisation not in (None, self.organisation):
            raise NotPermittedError(
                "BDN-Organisation names another organisation than the token's; only an operator may do that"
            )
        return self

    def of_all_teams(self) -> Caller:
        """The caller, for resources of the whole organisation. Raises ``NotPermittedError`` for a team's token."""
        if self.team is not None:
            raise NotPermittedError(f"this token is limited to team {self.team!r}: use a token without a team")
        return self

    def check_cluster(self, cluster: str) -> None:
        """Raise ``NotPermittedError`` for a token that is bound to another cluster."""
        if self.cluster not in (None, cluster):
            raise NotPermittedError(f"this token is limited to agents of cluster {self.cluster!r}")
