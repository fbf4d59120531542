"""Where a volume of training caches has the directories of a project and of a team. Existing volumes have these names."""

from typing import Final

from bdn.core.chunk import digest_of

USER_ARTIFACTS: Final = "user_artifacts"
HUGGINGFACE: Final = "huggingface"


def home_of(organisation: str) -> str:
    """An organisation's name may be any text, so its folder is named by a digest."""
    return digest_of(organisation.encode()).hex[:32]


def project_folder(organisation: str, project: str) -> str:
    return f"{home_of(organisation)}/projects/{project}"


def team_folder(organisation: str, team: str) -> str:
    return f"{home_of(organisation)}/teams/{team}"
