"""Patterns against an oracle that works differently, and against the standard library where both speak of one thing."""

from fnmatch import fnmatchcase

from hypothesis import assume, example, given
from hypothesis import strategies as st

from bdn.core.source.uri import Patterns, compile_pattern, select
from tests.support.content.naive_globs import matches

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


@given(paths_and_patterns_made_from_them())
def test_a_pattern_that_nearly_fits_selects_exactly_what_the_oracle_selects(both: tuple[str, str]) -> None:
    path, pattern = both
    assert bool(compile_pattern(pattern).fullmatch(path)) == matches(pattern, path)


@given(patterns, paths)
@example("**a*b", "a/ab")  # the first "a" is the wrong one
@example("**/a*b", "x/a/ab")
@example("a**/b", "a/x/b")
def test_a_pattern_selects_exactly_what_the_oracle_selects(pattern: str, path: str) -> None:
    assert bool(compile_pattern(pattern).fullmatch(path)) == matches(pattern, path)


@given(st.text("ab*?/[]!-.", min_size=1, max_size=12), st.text("ab/.-]", min_size=1, max_size=12))
def test_any_text_is_a_pattern_and_means_what_the_oracle_says(pattern: str, path: str) -> None:
    assume("//" not in path and not path.startswith("/") and not path.endswith("/"))
    assert bool(compile_pattern(pattern).fullmatch(path)) == matches(pattern, path)


@given(st.text("ab*?.[!]^", min_size=1, max_size=8), st.text("ab.]^[!", min_size=1, max_size=6))
def test_inside_one_segment_patterns_are_those_of_the_shell(pattern: str, name: str) -> None:
    assert bool(compile_pattern(pattern).fullmatch(name)) == fnmatchcase(name, pattern)


@given(paths)
def test_a_path_without_special_characters_is_a_pattern_for_itself_alone(path: str) -> None:
    assume("[" not in path)
    assert compile_pattern(path).fullmatch(path)
    assert not compile_pattern(path).fullmatch(f"{path}x")
    assert compile_pattern(f"**/{path}").fullmatch(path)
    assert compile_pattern(f"**/{path}").fullmatch(f"x/y/{path}")
    assert compile_pattern(f"{path}/").fullmatch(f"{path}/x/y")


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
    assert len(selection.warnings) == len(unmatched)
    for warning, (field, pattern) in zip(selection.warnings, unmatched, strict=True):
        assert warning.startswith(f"{field} {pattern!r} matched no file")
        deeper = f"**/{pattern.removeprefix('./')}"
        assert (f"{deeper!r} would have matched" in warning) == any(matches(deeper, path) for path in listing)
