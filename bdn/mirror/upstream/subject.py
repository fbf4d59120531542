"""Who asks, as clouds see it: the names of an organisation and one of its jobs in tokens, sessions and trust policies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from bdn.core.caller import ORGANISATION_PATTERN
from bdn.core.errors import InvalidRequestError

DRY_RUN: Final = "plan"  # the job of a dry run, which has no mirror
_ORGANISATION: Final = re.compile(ORGANISATION_PATTERN)
_JOB: Final = re.compile(r"[a-z0-9_]{2,32}")
_SESSION_NAME_LENGTH: Final = 64


@dataclass(frozen=True, slots=True)
class Subject:
    """An organisation and a job of it: the mirror's id, which we make and no caller can choose, or ``plan``."""

    organisation: str
    job: str

    def __post_init__(self) -> None:
        if not _ORGANISATION.fullmatch(self.organisation) or not _JOB.fullmatch(self.job):
            raise InvalidRequestError(
                f"organisation {self.organisation[:80]!r} cannot be named to a cloud: OIDC and AWS_ASSUME_ROLE need a name of "
                "at most 63 letters, digits, '.', '_' and '-'"
            )

    @property
    def claim(self) -> str:
        """``sub`` of an identity token."""
        return _claim(self.organisation, self.job)

    @property
    def pattern(self) -> str:
        """All subjects of the organisation, as a trust policy names them."""
        return _claim(self.organisation, "*")

    @property
    def session_name(self) -> str:
        """What the user's CloudTrail calls the session."""
        room = _SESSION_NAME_LENGTH - len(self.job) - 1
        return f"{self.organisation[:room]}@{self.job}"

    @property
    def external_id(self) -> str:
        """What a role's trust policy asks for, so that no other organisation can use the role through this mirror."""
        return f"bdn:{self.organisation}"


def _claim(organisation: str, job: str) -> str:
    return f"v=1:org={organisation}:job={job}:type=mirror"
