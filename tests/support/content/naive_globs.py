"""An oracle for patterns: the set of positions that a pattern can have reached in a path, piece by piece.

Written from the contract without looking at ``bdn.core.source.uri``' way, which builds one regular expression.
"""

from collections.abc import Callable, Iterator

Step = Callable[[str, int], Iterator[int]]  # where a piece can end in a path, when it begins at a position


def matches(pattern: str, path: str) -> bool:
    """Whether the pattern selects the path."""
    if pattern.endswith("/"):
        pattern += "**"
    pattern = pattern.removeprefix("./")
    reached = {0}
    for step in _steps(pattern):
        reached = {stop for start in reached for stop in step(path, start)}
    return len(path) in reached


def _steps(rest: str) -> Iterator[Step]:
    at_segment_start = True
    while rest:
        stars = len(rest) - len(rest.lstrip("*"))
        if at_segment_start and rest.startswith("**/"):
            rest = rest[3:]
            yield _any_folders
            continue
        if stars >= 2:
            yield _anything_but_nothing if at_segment_start and stars == len(rest) else _anything
            rest = rest[stars:]
        elif stars == 1:
            yield _within_segment
            rest = rest[1:]
        elif rest[0] == "[" and rest.find("]", 3 if rest[1:2] == "!" else 2) > 0:
            stop = rest.find("]", 3 if rest[1:2] == "!" else 2)
            yield _one_of(rest[1:stop])
            rest = rest[stop + 1 :]
        else:
            at_segment_start = rest[0] == "/"
            yield _one_but_slash if rest[0] == "?" else _exactly(rest[0])
            rest = rest[1:]
            continue
        at_segment_start = False


def _any_folders(path: str, start: int) -> Iterator[int]:
    yield start
    yield from (position + 1 for position in range(start, len(path)) if path[position] == "/")


def _anything(path: str, start: int) -> Iterator[int]:
    yield from range(start, len(path) + 1)


def _anything_but_nothing(path: str, start: int) -> Iterator[int]:
    yield from range(start + 1, len(path) + 1)


def _within_segment(path: str, start: int) -> Iterator[int]:
    segment = path[start:].split("/", maxsplit=1)[0]
    yield from range(start, start + len(segment) + 1)


def _one_but_slash(path: str, start: int) -> Iterator[int]:
    if path[start : start + 1] not in ("", "/"):
        yield start + 1


def _exactly(character: str) -> Step:
    def step(path: str, start: int) -> Iterator[int]:
        if path[start : start + 1] == character:
            yield start + 1

    return step


def _one_of(body: str) -> Step:
    negated, members = body.startswith("!"), body.removeprefix("!")
    ranges: list[tuple[str, str]] = []
    while members:
        low, high = (members[0], members[2]) if len(members) > 2 and members[1] == "-" else (members[0], members[0])
        ranges.append((low, high))
        members = members[3:] if len(members) > 2 and members[1] == "-" else members[1:]

    def step(path: str, start: int) -> Iterator[int]:
        character = path[start : start + 1]
        if character not in ("", "/") and any(low <= character <= high for low, high in ranges) != negated:
            yield start + 1

    return step
