"""The language of allow and ignore patterns, row by row. Compare ``docs`` of Baseten; ``huggingface_hub`` differs in ``*``."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from bdn.core.errors import InvalidRequestError
from bdn.core.source.patterns import Patterns, compile_pattern

MATCHES = """
config.json                config.json
model.safetensors          model.safetensors
*                          a
*                          .gitattributes
*                          [a]
*.safetensors              model.safetensors
*.safetensors              .safetensors
model-*-of-*.bin           model-00001-of-00002.bin
a*                         a
*a                         a
*a*                        banana
a*b*c                      abbcbc
*.*                        a.b
sub/*                      sub/a
sub/*                      sub/.hidden
*/*                        a/b
*/config.json              text_encoder/config.json
*/*/c                      a/b/c
?                          a
?                          é
?                          😀
a?c                        a.c
??                         ab
?*                         a
**                         a
**                         a/b/c
**                         .a/.b
**/*                       a
**/*                       a/b/c
**/*.safetensors           model.safetensors
**/*.safetensors           a/model.safetensors
**/*.safetensors           a/b/model.safetensors
**/a                       a
**/a                       b/c/a
**/a/**                    a/b
**/a/**                    x/y/a/b/c
a/**                       a/b
a/**                       a/b/c
a/**                       a/.b
a/**/b                     a/b
a/**/b                     a/x/b
a/**/b                     a/x/y/b
a/**/b/**/c                a/b/c
a/**/b/**/c                a/b/b/x/c
**/a*b                     x/a/ab
a/**/b/**/c/**/d           a/b/c/b/d
**/a/b                     a/a/b
**/**/a                    a
a**                        a
a**                        a/b
a**                        abc/d
a**c                       a/b/c
a**c                       ac
a**/b                      a/b
a**/b                      ax/y/b
**a                        x/ya
**a*b                      a/ab
**.json                    a/b.json
sub/                       sub/a
sub/                       sub/a/b
sub/                       sub/.a
./sub/                     sub/a
./                         a
./                         a/b
**/sub/                    x/sub/a
**/sub/                    sub/a
*/                         x/a
./config.json              config.json
[ab]                       a
[ab]                       b
[a-c]x                     bx
[a-cx-z]                   y
[!a]                       b
[!a]                       .
[!a-c]                     d
[]]                        ]
[]a]                       a
[!]]                       a
[!]a]                      b
[[]                        [
[[]a[]]                    [a]
[a-]                       -
[-a]                       -
[--0]                      .
[*]                        *
[?]                        ?
[^a]                       ^
[^a]                       a
[.]a                       .a
[&&a]                      &
[||a]                      |
[a\\]                      \\
a[/b]c                     abc
[+-9]                      5
x[!a-c]y                   x-y
[                          [
a[                         a[
a[b                        a[b
a]                         a]
[]                         []
[!]                        [!]
{a,b}                      {a,b}
a.b                        a.b
a+b(c)$                    a+b(c)$
!a                         !a
README.md                  README.md
тест/*                     тест/модель
[\u0430-я]*                     модель
*模*                       大模型
é*                         état
***                        a
a/***                      a/b
"""

DIFFERS = """
config.json                sub/config.json
config.json                config_json
config.json                config.json.bak
config.json                xconfig.json
*                          a/b
*.safetensors              sub/model.safetensors
*.safetensors              model.safetensors.index.json
*.safetensors              model.Safetensors
*.SAFETENSORS              model.safetensors
*/*                        a
*/*                        a/b/c
*/config.json              config.json
sub/*                      sub/a/b
sub/*                      sub
?                          ab
a?c                        ac
a?c                        a/c
a*c                        a/c
a*b*c                      acb
*a*a*                      a
**/a                       ba
**/a                       x/ba
**/a                       a/b
a/**                       a
a/**                       ab
a/**                       b/a/c
a/**/b                     a/xb
a/**/b                     ax/b
a/**/b                     ab
a/**/b/**/c                a/c/b
**/*.bin                   a.bin/b
**/a*b                     a/b
a**c                       a/b
a**/b                      ab
sub/                       sub
sub/                       subx/a
sub/                       x/sub/a
./sub/                     subx
*/                         a
[ab]                       c
[ab]                       ab
[ab]                       A
[a-c]                      d
[a-c]                      -
[c-a]                      b
[!a]                       a
[!a-c]                     b
a[!b]c                     a/c
a[/]c                      a/c
a[+-9]c                    a/c
a[!x]c                     a/c
[!]]                       ]
[]a]                       b
[*]                        a
[.]a                       xa
[a                         a
[]                         a
{a,b}                      a
a.b                        axb
README.md                  readme.md
*.txt                      a.txt~
../a                       a
x/../a                     a
"""


def rows(table: str) -> list[tuple[str, str]]:
    return [(pattern, path) for pattern, path in (line.split() for line in table.split("\n") if line)]


def test_the_table_is_long_enough() -> None:
    assert len(rows(MATCHES)) >= 60
    assert len(rows(DIFFERS)) >= 40


@pytest.mark.parametrize(("pattern", "path"), rows(MATCHES))
def test_a_pattern_matches(pattern: str, path: str) -> None:
    assert compile_pattern(pattern).fullmatch(path)


@pytest.mark.parametrize(("pattern", "path"), rows(DIFFERS))
def test_a_pattern_does_not_match(pattern: str, path: str) -> None:
    assert not compile_pattern(pattern).fullmatch(path)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [("*", "a\nb"), ("**", "a\nb/c"), ("a*", "a b"), ("a b/*", "a b/c d"), ("a?b", "a\nb"), ("[ ]", " ")],
)
def test_blanks_and_line_breaks_are_ordinary_characters(pattern: str, path: str) -> None:
    assert compile_pattern(pattern).fullmatch(path)
    assert not compile_pattern("ab").fullmatch("ab\n")


def test_composed_and_decomposed_letters_are_different_names() -> None:
    """A file system that keeps bytes keeps them apart; so do we."""
    assert not compile_pattern("\u00e9").fullmatch("e\u0301")
    assert not compile_pattern("e\u0301").fullmatch("\u00e9")


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


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*a" * 30 + "b", "a" * 255),
        ("**/" * 30 + "b", "a/" * 1000 + "a"),
        ("**/a/" * 30 + "b", "a/" * 1000 + "a"),
        ("**a" * 30 + "b", "/".join(["a" * 255] * 12)),
        ("x*" + "**a*a" * 10 + "b", "x" + "/".join(["a" * 100] * 10)),
        ("**/*a*a*a" * 5 + "b", "/".join(["a" * 100] * 10)),
    ],
    ids=["stars", "folders", "folders and names", "crossing stars", "both stars", "all"],
)
def test_no_pattern_of_a_user_can_stop_the_mirror(pattern: str, path: str) -> None:
    with at_most(seconds=5):
        assert not compile_pattern(pattern).fullmatch(path)


def test_a_pattern_longer_than_any_path_and_more_than_a_thousand_patterns_are_refused_with_numbers() -> None:
    assert Patterns(("a" * 4096,)).allow
    with pytest.raises(InvalidRequestError, match="has 4097 characters; the limit is 4096"):
        Patterns(ignore=("a" * 4097,))
    assert len(Patterns(("a",) * 999, ("b",)).allow) == 999
    with pytest.raises(InvalidRequestError, match="1001 patterns are too many for one source; the limit is 1000"):
        Patterns(("a",) * 1000, ("b",))
