"""What patterns are refused and which hints a user gets; what they select is in docs/patterns.md and ``tests/property``."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from bdn.core.errors import InvalidRequestError
from bdn.core.source.uri import Patterns, compile_pattern, select


@pytest.mark.parametrize("pattern", ["", "/a", "/", "//", "a\0b"])
@pytest.mark.parametrize("field", ["allow", "ignore"])
def test_an_empty_or_absolute_pattern_or_one_with_nul_is_refused(pattern: str, field: str) -> None:
    with pytest.raises(InvalidRequestError, match="patterns are relative to the source"):
        Patterns(**{field: ("ok", pattern)})


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Ends a runaway match, which Python interrupts for signals alone."""

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("pattern", "path"), [
    ("*a" * 30 + "b", "a" * 255), ("**/" * 30 + "b", "a/" * 1000 + "a"), ("**/a/" * 30 + "b", "a/" * 1000 + "a"),
    ("**a" * 30 + "b", "/".join(["a" * 255] * 12)), ("x*" + "**a*a" * 10 + "b", "x" + "/".join(["a" * 100] * 10)),
    ("**/*a*a*a" * 5 + "b", "/".join(["a" * 100] * 10)),
], ids=["stars", "folders", "folders and names", "crossing stars", "both stars", "all"])  # fmt: skip
def test_no_pattern_of_a_user_can_stop_the_mirror(pattern: str, path: str) -> None:
    with at_most(seconds=60):
        assert not compile_pattern(pattern).fullmatch(path)


def test_a_pattern_longer_than_any_path_and_more_than_a_thousand_patterns_are_refused_with_numbers() -> None:
    assert Patterns(("a" * 4096,)).allow
    with pytest.raises(InvalidRequestError, match="has 4097 characters; the limit is 4096"):
        Patterns(ignore=("a" * 4097,))
    assert len(Patterns(("a",) * 999, ("b",)).allow) == 999
    with pytest.raises(InvalidRequestError, match="1001 patterns are too many for one source; the limit is 1000"):
        Patterns(("a",) * 1000, ("b",))


def test_a_pattern_that_leaves_out_shards_in_folders_is_a_warning_with_the_pattern_that_takes_them() -> None:
    paths = ["model-1.safetensors", "deep/model-2.safetensors", "deep/er/model-3.safetensors", "deep/other.txt"]

    (told,) = select(paths, Patterns(("*.safetensors",))).warnings
    assert told == (
        "allow_patterns '*.safetensors' leaves out 2 files in folders, such as 'deep/model-2.safetensors': '*' does not cross "
        "'/' here; write '**/*.safetensors' to have them"
    )
    for allow, ignore in (
        (("**/*.safetensors",), ()),
        (("*.safetensors", "deep/**"), ()),
        (("*.safetensors",), ("deep/",)),
        (("model*",), ()),  # a listing may be narrowed to what begins so
    ):
        assert select(paths, Patterns(allow, ignore)).warnings == (), (allow, ignore)
