"""Who may find a content through an upstream's identity, and may read the slabs that it was packed into."""

from __future__ import annotations

from typing import Final

PUBLIC: Final = "public"  # everybody
_OWNED: Final = "organisation:"


def scope_of(organisation: str) -> str:
    """The scope of what needs an organisation's credentials."""
    return f"{_OWNED}{organisation}"


def owner_of(scope: str) -> str | None:
    """Whose the scope is; None when it is everybody's."""
    return None if scope == PUBLIC else scope.removeprefix(_OWNED)
