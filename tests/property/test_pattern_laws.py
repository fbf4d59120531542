"""Patterns against an oracle that works differently, and the literal prefixes outside of which they select nothing."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bdn.core.source.uri import MOST_PREFIXES, Patterns, compile_pattern, literal_prefixes, literal_start, select

# Few letters and many special characters, so that patterns and paths meet often.
PIECES = [
    *("a", "b", "ab", ".", "A", "é", "-", "*", "**", "***", "?", "/", "**/", "/**"),
    *("[ab]", "[!a]", "[a-c]", "[c-a]", "[", "]", "[!]"),
]
patterns = (
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=9).map("".join).filter(lambda text: not text.startswith("/"))
)
segments = st.sampled_from(["a", "b", "ab", "aba", ".a", "A", "é", "[a]", "a-b", "bb"])
paths = st.lists(segments, min_size=1, max_size=5).map("/".join)


@st.composite
def paths_and_patterns_made_from_them(draw: st.DrawFn) -> tuple[str, str]:
    """A path, and the same path with some of its characters replaced by wildcards: nearly always almost a match."""
    path = draw(paths)
    wild = st.sampled_from(["?", "*", "**", "**/", "[ab]", "[!a]", "[a-c]", "[+-9]", "x", ""])
    return path, "".join(draw(st.one_of(st.just(character), wild)) for character in path)


texts = st.text("ab/.-]", min_size=1, max_size=12).filter(lambda text: "" not in text.split("/"))


@settings(max_examples=3 * settings().max_examples)
@given(
    st.one_of(
        paths_and_patterns_made_from_them(),
        st.tuples(paths, patterns),
        st.tuples(texts, st.text("ab*?/[]!-.", min_size=1, max_size=12)),
    )
)
@example(("a/ab", "**a*b"))  # the first "a" is the wrong one
@example(("x/a/ab", "**/a*b"))
@example(("a/x/b", "a**/b"))
def test_any_text_is_a_pattern_and_selects_exactly_what_the_oracle_selects(both: tuple[str, str]) -> None:
    path, pattern = both
    assert bool(compile_pattern(pattern).fullmatch(path)) == matches(pattern, path)


@given(
    st.lists(paths, max_size=6, unique=True),
    st.lists(patterns, max_size=3).map(tuple),
    st.lists(patterns, max_size=3).map(tuple),
)
def test_a_selection_is_what_some_allow_pattern_and_no_ignore_pattern_matches(
    listing: list[str], allow: tuple[str, ...], ignore: tuple[str, ...]
) -> None:
    selection = select(listing, Patterns(allow, ignore))
    assert list(selection.paths) == [
        path
        for path in listing
        if (not allow or any(matches(pattern, path) for pattern in allow))
        and not any(matches(pattern, path) for pattern in ignore)
    ]
    unmatched = [
        (field, pattern)
        for field, given_ in (("allow_patterns", allow), ("ignore_patterns", ignore))
        for pattern in dict.fromkeys(given_)
        if not any(matches(pattern, path) for path in listing)
    ]
    told = [warning for warning in selection.warnings if " matched no file" in warning]
    assert len(told) == len(unmatched)
    for warning, (field, pattern) in zip(told, unmatched, strict=True):
        assert warning.startswith(f"{field} {pattern!r} matched no file")
        deeper = f"**/{pattern.removeprefix('./')}"
        assert (f"{deeper!r} would have matched" in warning) == any(matches(deeper, path) for path in listing)


def begins(path: str, prefixes: tuple[str, ...]) -> bool:
    return any(path.startswith(prefix) for prefix in prefixes)


@given(paths_and_patterns_made_from_them())
@example(("[a", "[a"))
@example((".a", "./?a"))
def test_what_a_pattern_matches_begins_with_its_literal_start(both: tuple[str, str]) -> None:
    path, pattern = both
    if matches(pattern, path):
        assert path.startswith(literal_start(pattern))


@given(
    st.lists(paths, max_size=6, unique=True), st.lists(patterns, max_size=24).map(tuple), st.lists(patterns, max_size=2)
)
def test_every_selected_path_begins_with_a_prefix(
    listing: list[str], allow: tuple[str, ...], ignore: list[str]
) -> None:
    given_ = Patterns(allow, tuple(ignore))
    prefixes = literal_prefixes(given_)
    for path in select(listing, given_).paths:
        assert begins(path, prefixes)
    narrowed = [path for path in listing if begins(path, prefixes)]
    assert select(narrowed, given_).paths == select(listing, given_).paths


@given(st.lists(patterns, max_size=60).map(tuple))
def test_prefixes_are_few_sorted_and_none_begins_with_another(allow: tuple[str, ...]) -> None:
    prefixes = literal_prefixes(Patterns(allow))
    assert 1 <= len(prefixes) <= MOST_PREFIXES
    assert list(prefixes) == sorted(prefixes)
    assert not [(a, b) for a in prefixes for b in prefixes if a != b and b.startswith(a)]


@given(st.lists(st.text("ab/", min_size=1, max_size=6).filter(lambda text: text[0] != "/"), min_size=1, max_size=16))
def test_of_a_few_prefixes_none_is_shortened(starts: list[str]) -> None:
    prefixes = literal_prefixes(Patterns(tuple(f"{start}*" for start in starts)))
    assert set(prefixes) == {start for start in starts if not any(start != s and start.startswith(s) for s in starts)}


@given(st.lists(st.text("abc", min_size=1, max_size=6), min_size=20, max_size=60, unique=True))
def test_of_many_prefixes_each_that_is_left_is_what_some_have_in_common(starts: list[str]) -> None:
    prefixes = literal_prefixes(Patterns(tuple(starts)))
    assert len(prefixes) <= MOST_PREFIXES
    assert all(begins(start, prefixes) for start in starts)
    for prefix in prefixes:
        below = [start for start in starts if start.startswith(prefix)]
        assert below
        assert prefix in below or len({start[len(prefix)] for start in below}) > 1


@pytest.mark.parametrize(("allow", "prefixes"), [
    ((), ("",)),
    (("*",), ("",)),
    (("**/*.json",), ("",)),
    (("./",), ("",)),
    (("[ab]/x",), ("",)),
    (("?",), ("",)),
    (("weights/",), ("weights/",)),
    (("./weights/**",), ("weights/",)),
    (("weights/**/a.bin",), ("weights/",)),
    (("model-*-of-*.safetensors", "config.json"), ("config.json", "model-")),
    (("a/b/*", "a/*", "a/b"), ("a/",)),
    (("a", "ab", "b"), ("a", "b")),
    (("config.json", "*"), ("",)),
    (("[unclosed/*",), ("[unclosed/",)),
    (("shards[0-9]/",), ("shards",)),
    (("données/*",), ("données/",)),
])  # fmt: skip
def test_prefixes_of_patterns_as_people_write_them(allow: tuple[str, ...], prefixes: tuple[str, ...]) -> None:
    assert literal_prefixes(Patterns(allow, ("a/*",))) == prefixes


def test_one_too_many_merges_the_two_that_are_most_alike() -> None:
    names = tuple(f"{letter}/x" for letter in "abcdefghijklmno")
    assert literal_prefixes(Patterns((*names, "shard-1"))) == (*names, "shard-1")
    assert literal_prefixes(Patterns((*names, "shard-1", "shard-2"))) == (*names, "shard-")


# --- An oracle: the set of positions that a pattern can have reached in a path, piece by piece. The code builds a regular expression. ---
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
