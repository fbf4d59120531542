"""Which files patterns select together, and which warnings a user gets."""

import pytest

from bdn.core.source.patterns import EVERYTHING, Patterns, SelectedPaths, select

REPO = (
    ".gitattributes", "README.md", "config.json", "model.safetensors", "original/consolidated.00.pth",
    "text_encoder/config.json", "text_encoder/model.safetensors",
)  # fmt: skip


def chosen(*, allow: tuple[str, ...] = (), ignore: tuple[str, ...] = ()) -> SelectedPaths:
    return select(REPO, Patterns(allow, ignore))


def test_no_patterns_select_everything_in_the_order_given() -> None:
    assert select(REPO, EVERYTHING) == SelectedPaths(REPO, ())
    assert select(REPO[::-1], EVERYTHING).paths == REPO[::-1]


def test_selecting_nothing_is_no_error_here() -> None:
    assert chosen(ignore=("**",)) == SelectedPaths((), ())


def test_a_pattern_that_matched_nothing_is_named_with_its_field() -> None:
    selection = chosen(allow=("config.json", "*.gguf"), ignore=("*.onnx",))
    assert selection.paths == ("config.json",)
    assert selection.warnings == ("allow_patterns '*.gguf' matched no file", "ignore_patterns '*.onnx' matched no file")


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("*.pth", "**/*.pth"),
        ("consolidated.00.pth", "**/consolidated.00.pth"),
        ("./*.pth", "**/*.pth"),
        ("consolidated*", "**/consolidated*"),
    ],
)
def test_the_deeper_form_is_a_hint_when_it_would_have_matched(pattern: str, hint: str) -> None:
    assert chosen(allow=(pattern,)).warnings == (
        f"allow_patterns {pattern!r} matched no file; {hint!r} would have matched: '*' does not cross '/' here",
    )


def test_a_folder_that_lies_deeper_gets_the_hint_too() -> None:
    (warning,) = select(["a/b/c"], Patterns(ignore=("b/",))).warnings
    assert "'**/b/' would have matched" in warning


def test_there_is_no_hint_when_the_deeper_form_would_not_have_matched() -> None:
    (warning,) = chosen(allow=("**/*.gguf",)).warnings
    assert "would have matched" not in warning


@pytest.mark.parametrize(
    ("allow", "ignore"), [(("*.md", "*.json"), ("README.*",)), (("*.json",), ("*.md",))], ids=["ignored", "not allowed"]
)
def test_a_pattern_that_matched_what_the_other_field_leaves_out_has_matched(
    allow: tuple[str, ...], ignore: tuple[str, ...]
) -> None:
    assert chosen(allow=allow, ignore=ignore).warnings == ()


def test_a_pattern_given_twice_is_named_once_per_field() -> None:
    selection = chosen(allow=("*.a", "*.a", "*"), ignore=("*.a",))
    assert selection.warnings == ("allow_patterns '*.a' matched no file", "ignore_patterns '*.a' matched no file")


def test_an_empty_listing_warns_about_every_pattern() -> None:
    assert len(select((), Patterns(("*",), ("x",))).warnings) == 2
