"""Which files patterns select together, and which warnings a user gets."""

import pytest

from bdn.core.source.uri import EVERYTHING, Patterns, SelectedPaths, select

REPO = (
    ".gitattributes", "README.md", "config.json", "model.safetensors", "original/consolidated.00.pth",
    "text_encoder/config.json", "text_encoder/model.safetensors",
)  # fmt: skip


def chosen(*, allow: tuple[str, ...] = (), ignore: tuple[str, ...] = ()) -> SelectedPaths:
    return select(REPO, Patterns(allow, ignore))


def test_no_patterns_select_everything_in_the_order_given() -> None:
    assert select(REPO, EVERYTHING) == SelectedPaths(REPO, ())
    assert select(REPO[::-1], EVERYTHING).paths == REPO[::-1]


def test_a_pattern_that_matched_nothing_is_named_with_its_field() -> None:
    selection = chosen(allow=("config.json", "*.gguf"), ignore=("*.onnx",))
    assert selection.paths == ("config.json",)
    assert selection.warnings == ("allow_patterns '*.gguf' matched no file", "ignore_patterns '*.onnx' matched no file")


@pytest.mark.parametrize(("pattern", "hint"), [
    ("*.pth", "**/*.pth"),
    ("consolidated.00.pth", "**/consolidated.00.pth"),
    ("./*.pth", "**/*.pth"),
    ("consolidated*", "**/consolidated*"),
])  # fmt: skip
def test_the_deeper_form_is_a_hint_when_it_would_have_matched(pattern: str, hint: str) -> None:
    assert chosen(allow=(pattern,)).warnings == (
        f"allow_patterns {pattern!r} matched no file; {hint!r} would have matched: '*' does not cross '/' here",
    )


def test_a_folder_that_lies_deeper_gets_the_hint_too() -> None:
    (warning,) = select(["a/b/c"], Patterns(ignore=("b/",))).warnings
    assert "'**/b/' would have matched" in warning
