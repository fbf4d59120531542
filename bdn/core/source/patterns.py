"""Which files of a source are wanted: allow and ignore globs over the path relative to the source.

``*`` and ``?`` stay inside one path segment, ``**`` crosses segments, ``[…]`` are character classes (``[!…]`` negates), a
trailing ``/`` means everything below. Dotfiles are ordinary files, case counts, ignore wins. This is the language of
Baseten's documentation; in ``huggingface_hub`` a ``*`` crosses ``/``, hence the hint in the warnings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

from bdn.core.errors import InvalidRequestError

LENGTH_LIMIT: Final = 4096  # characters; no path is longer, and a pattern of a megabyte takes a minute to understand
COUNT_LIMIT: Final = 1000
MOST_PREFIXES: Final = 16  # each may cost a source a request of its own
_WITHIN: Final = "[^/]*?"
_FOLDERS: Final = "(?:[^/]+/)*?"
_ACROSS: Final = ".*?"
_BELOW: Final = ".+"


@dataclass(frozen=True, slots=True)
class Patterns:
    """``allow`` empty means everything; ``ignore`` empty means nothing."""

    allow: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.allow) + len(self.ignore)
        if count > COUNT_LIMIT:
            msg = (
                f"{count} patterns are too many for one source; the limit is {COUNT_LIMIT}; "
                "use globs, or several sources"
            )
            raise InvalidRequestError(msg)
        for pattern in (*self.allow, *self.ignore):
            if not pattern or pattern.startswith("/") or "\0" in pattern:
                msg = f"pattern {pattern!r} is empty, absolute or holds a NUL; patterns are relative to the source"
                raise InvalidRequestError(msg)
            if len(pattern) > LENGTH_LIMIT:
                msg = f"pattern {pattern[:80]!r}… has {len(pattern)} characters; the limit is {LENGTH_LIMIT}"
                raise InvalidRequestError(msg)


EVERYTHING: Final = Patterns()


@dataclass(frozen=True, slots=True)
class SelectedPaths:
    """What ``select`` chose, in the order given, and a warning for each pattern that matched nothing."""

    paths: tuple[str, ...]
    warnings: tuple[str, ...]


def select(paths: Sequence[str], patterns: Patterns) -> SelectedPaths:
    """Apply the patterns to normalised paths. Selecting nothing is the caller's error to raise, not ours."""
    allow = [(pattern, compile_pattern(pattern)) for pattern in patterns.allow]
    ignore = [(pattern, compile_pattern(pattern)) for pattern in patterns.ignore]
    unmatched = {pattern for pattern, _ in (*allow, *ignore)}
    chosen: list[str] = []
    for path in paths:
        allowed_by = [pattern for pattern, glob in allow if glob.fullmatch(path)]
        ignored_by = [pattern for pattern, glob in ignore if glob.fullmatch(path)]
        unmatched.difference_update(allowed_by, ignored_by)
        if (allowed_by or not allow) and not ignored_by:
            chosen.append(path)
    warnings = [
        f"{field} {pattern!r} matched no file{hint_for(pattern, paths)}"
        for field, given in (("allow_patterns", patterns.allow), ("ignore_patterns", patterns.ignore))
        for pattern in dict.fromkeys(given)
        if pattern in unmatched
    ]
    return SelectedPaths(tuple(chosen), tuple(warnings))


def hint_for(pattern: str, paths: Sequence[str]) -> str:
    """``; …`` with the ``**/`` form where that would have matched, otherwise nothing."""
    deeper = f"**/{pattern.removeprefix('./')}"
    glob = compile_pattern(deeper)
    if any(glob.fullmatch(path) for path in paths):
        return f"; {deeper!r} would have matched: '*' does not cross '/' here"
    return ""


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A regular expression for ``fullmatch`` on a normalised path."""
    pattern = _written_out(pattern)
    pieces: list[str] = []
    position = 0
    while position < len(pattern):
        piece, position = _translate(pattern, position)
        pieces.append(piece)
    # Each wildcard takes the shortest text with which the pieces up to the next wildcard of its kind match, and is then
    # fixed by an atomic group: what a longer text would leave over, the next wildcard can take itself. Without this,
    # "*a*a*a*a*a*b" tries every way to share out "aaaa…", which is days for a name of 255 bytes.
    *runs, last = [_run(run) for run in _split(pieces, (_FOLDERS, _ACROSS, _BELOW))]
    return re.compile("".join(f"(?>{run})" for run in runs) + last, re.DOTALL)


def literal_start(pattern: str) -> str:
    """What every path that the pattern matches begins with; for a pattern without wildcards, that path."""
    pattern = _written_out(pattern)
    for position, character in enumerate(pattern):
        if character in "*?" or (character == "[" and _class_end(pattern, position)):
            return pattern[:position]
    return pattern


def _written_out(pattern: str) -> str:
    """Without the short forms at both ends."""
    return (f"{pattern}**" if pattern.endswith("/") else pattern).removeprefix("./")


def _run(pieces: Sequence[str]) -> str:
    """What follows one crossing wildcard, up to the next one."""
    head, *stars = ["".join(run) for run in _split(pieces, (_WITHIN,))]
    return head + "".join(f"(?>{star})" for star in stars[:-1]) + "".join(stars[-1:])


def _split(pieces: Sequence[str], wildcards: Sequence[str]) -> list[list[str]]:
    """Cut before each of these wildcards; the first part begins with none and may be empty."""
    runs: list[list[str]] = [[]]
    for piece in pieces:
        if piece in wildcards:
            runs.append([])
        runs[-1].append(piece)
    return runs


def _translate(pattern: str, position: int) -> tuple[str, int]:
    """One piece of the expression, and where the next one begins."""
    character = pattern[position]
    at_segment_start = position == 0 or pattern[position - 1] == "/"
    # The cases: "**/" at the start of a segment is any number of folders, none included; any other run of two or more
    # stars is any text; a single star or question mark stays in its segment; a class never matches "/".
    if at_segment_start and pattern.startswith("**/", position):
        return _FOLDERS, position + 3
    if pattern.startswith("**", position):
        stop = position
        while stop < len(pattern) and pattern[stop] == "*":
            stop += 1
        return _BELOW if at_segment_start and stop == len(pattern) else _ACROSS, stop
    if character == "*":
        return _WITHIN, position + 1
    if character == "?":
        return "[^/]", position + 1
    if character == "[" and (stop := _class_end(pattern, position)):
        return _character_class(pattern[position + 1 : stop]), stop + 1
    return re.escape(character), position + 1


def _class_end(pattern: str, position: int) -> int:
    """The index of the closing bracket, or 0 when the class is never closed (then ``[`` is an ordinary character)."""
    first = position + 1
    if pattern[first : first + 1] == "!":
        first += 1
    return max(pattern.find("]", first + 1), 0)


def _character_class(body: str) -> str:
    negated = body.startswith("!")
    members = body[1:] if negated else body
    parts: list[str] = []
    position = 0
    while position < len(members):
        if members[position + 1 : position + 2] == "-" and position + 2 < len(members):
            low, high = members[position], members[position + 2]
            if low <= high:  # a reversed range matches nothing, as in fnmatch
                parts.append(f"{re.escape(low)}-{re.escape(high)}")
            position += 3
        else:
            parts.append(re.escape(members[position]))
            position += 1
    if negated:
        return f"[^/{''.join(parts)}]"
    return f"(?!/)[{''.join(parts)}]" if parts else "(?!)"


# --- which part of a source patterns can select from: a listing can be narrowed to it ---


def literal_prefixes(patterns: Patterns) -> tuple[str, ...]:
    """Every selected path begins with one of these; ``("",)`` when nothing is known.

    Sorted, none the beginning of another, and at most ``MOST_PREFIXES``: of more, neighbours are replaced by what they have in common.
    """
    if not patterns.allow:
        return ("",)
    return common_beginnings(map(literal_start, patterns.allow))


def common_beginnings(texts: Iterable[str]) -> tuple[str, ...]:
    """Every one of these texts begins with one of the answer's, which are as ``literal_prefixes`` says."""
    return _merged(_outermost(texts))


def _outermost(prefixes: Iterable[str]) -> list[str]:
    """Without those that begin with another one. A prefix sorts directly before all that begin with it."""
    outermost: list[str] = []
    for prefix in sorted(prefixes):
        if not outermost or not prefix.startswith(outermost[-1]):
            outermost.append(prefix)
    return outermost


def _merged(prefixes: list[str]) -> tuple[str, ...]:
    """Cut between the neighbours that have least in common; each part becomes what its first and its last share."""
    gaps = range(1, len(prefixes))
    by_kinship = sorted(gaps, key=lambda gap: len(_common(prefixes[gap - 1], prefixes[gap])))
    cuts = [0, *sorted(by_kinship[: MOST_PREFIXES - 1]), len(prefixes)]
    return tuple(_outermost(_common(prefixes[start], prefixes[stop - 1]) for start, stop in pairwise(cuts)))


def _common(one: str, other: str) -> str:
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]
