"""What a job requests in its comment: ``bdn:SOURCE``, or ``bdn:[secret=SECRET] NAME=SOURCE NAME=SOURCE …``.

``NAME`` is the environment variable with the path of the source's files. A source holds no space, and begins with a
scheme in lower case, so ``=`` in front of it is never a part of it. ``SECRET`` is one that the operator permits.
"""

import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, Self

from bdn.core.errors import InvalidRequestError
from bdn.core.source.uri import parse_source

PREFIX: Final = "bdn:"
ONLY_NAME: Final = "BDN_WEIGHTS"  # of a single source without a name
MOST_SOURCES: Final = 16
_OPENED_BY: Final = "secret="
_LONGEST: Final = 4096  # characters
_NAME: Final = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_NOT_FOR_FILES: Final = re.compile(r"(?:SLURM|BDN|LD)_.*|PATH|HOME|SHELL|IFS")
_FORM: Final = (
    "write --comment='bdn:hf://org/model@main' or --comment='bdn:MODEL=hf://org/model@main DATA=s3://bucket/data'"
)


@dataclass(frozen=True, slots=True)
class NamedSource:
    """A source, and the environment variable for its path."""

    name: str
    source: str

    @classmethod
    def of(cls, item: str) -> Self:
        """Raises ``InvalidRequestError``, ``InvalidSourceError``."""
        name, equals, source = item.partition("=")
        if not equals or "://" in name:
            name, source = ONLY_NAME, item
        elif not _NAME.fullmatch(name) or _NOT_FOR_FILES.fullmatch(name):
            raise InvalidRequestError(
                f"{name[:80]!r} cannot name an environment variable for files: use capital letters, digits and '_', at most "
                "64, and neither SLURM_…, BDN_…, LD_…, PATH, HOME, SHELL nor IFS"
            )
        parse_source(source)
        return cls(name, source)


@dataclass(frozen=True, slots=True)
class Requested:
    """The sources of a job, and the secret that opens all of them."""

    sources: tuple[NamedSource, ...]
    secret: str | None = None


def requested(comment: str, permitted: AbstractSet[str] = frozenset()) -> Requested:
    """Raises ``InvalidRequestError``, ``InvalidSourceError``: the message says what to write instead."""
    if len(comment) > _LONGEST or not comment.isascii() or not comment.isprintable():
        raise InvalidRequestError(
            f"the comment is longer than {_LONGEST} characters or has characters that are not printable ASCII; {_FORM}"
        )
    items = [item for item in comment.removeprefix(PREFIX).split(" ") if item]
    secret = items.pop(0).removeprefix(_OPENED_BY) if items and items[0].startswith(_OPENED_BY) else None
    if secret is not None and secret not in permitted:
        known = ", ".join(sorted(permitted)) or "none"
        raise InvalidRequestError(
            f"comments of this cluster may not name the secret {secret[:80]!r} (permitted: {known}); an operator permits it "
            "with --secret in the prolog"
        )
    found = tuple(map(NamedSource.of, items))
    if not found or len(found) > MOST_SOURCES:
        raise InvalidRequestError(f"the comment names {len(found)} sources; name 1 to {MOST_SOURCES}; {_FORM}")
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise InvalidRequestError(f"two sources of the comment have the same name; {_FORM}")
    return Requested(found, secret)
