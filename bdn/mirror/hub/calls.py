"""What a request of a hub client asks about, as its address says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import quote, unquote

from bdn.core.source.uri import REPO_KINDS, HuggingFaceUri, RepoKind

_KINDS: Final[Mapping[str, RepoKind]] = {"models": "model", **REPO_KINDS}
_OPERATIONS: Final = frozenset(
    {"revision", "tree", "paths-info", "refs", "commits", "discussions", "xet-read-token", "auth-check"}
)
_MAIN: Final = "main"


@dataclass(frozen=True, slots=True)
class HubCall:
    """``operation`` "" describes the repository, "resolve" is a file. ``path`` is below the revision, decoded."""

    kind: RepoKind
    repo_id: str
    operation: str
    revision: str = _MAIN
    path: str = ""

    @classmethod
    def of(cls, path: str) -> Self | None:
        """None: the address is about no repository.

        Segments are decoded one by one: a revision such as ``refs%2Fpr%2F1`` is one segment.
        """
        segments = [unquote(segment) for segment in path.removeprefix("/").split("/")]
        if not {"", ".", ".."}.isdisjoint(part for segment in segments for part in segment.split("/")):
            return None  # at the hub it could be another repository
        if segments[0] == "api":
            return cls._of_api(segments[1:])
        kind = REPO_KINDS.get(segments[0])
        rest = segments if kind is None else segments[1:]
        length = next((at for at in (1, 2) if rest[at : at + 1] == ["resolve"]), None)
        if length is None or len(rest) < length + 3:
            return None
        revision, inside = rest[length + 1], "/".join(rest[length + 2 :])
        return cls(kind or "model", "/".join(rest[:length]), "resolve", revision, inside)

    @classmethod
    def _of_api(cls, segments: list[str]) -> Self | None:
        kind = _KINDS.get(segments[0]) if segments else None
        rest = segments[1:]
        if kind is None or not rest or not all(rest[:1]):
            return None
        length = 1 if len(rest) == 1 or rest[1] in _OPERATIONS else 2
        operation, revision = (*rest[length:], "", "")[:2]
        if operation and operation not in _OPERATIONS:
            return None
        return cls(kind, "/".join(rest[:length]), operation, revision or _MAIN, "/".join(rest[length + 2 :]))

    @property
    def repository(self) -> HuggingFaceUri:
        return HuggingFaceUri(self.kind, self.repo_id, None)

    @property
    def api(self) -> str:
        """The address of the repository at the hub's API."""
        return f"/api/{self.kind}s/{quote(self.repo_id)}"

    def moved(self, target: str, there: "HubCall") -> str:
        """The target at the repository's new name; the hub redirects from old names, such as ``gpt2``."""
        return target.replace(f"/{quote(self.repo_id)}/", f"/{quote(there.repo_id)}/", 1)
