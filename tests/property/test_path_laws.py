"""Paths and mounts: whatever text comes, nothing unsafe gets through."""

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.errors import InvalidMountError
from bdn.core.source.listing import UnsafePathError, check_tree, normalise_path
from bdn.core.source.uri import check_mounts, normalise_mount

segments = st.sampled_from(
    ["a", "b", "ab", "a-b", "", ".", "..", "...", "..a", "é", " ", "\0", "\\", "\n", "x" * 256, "\ud800"]
)
listed = st.one_of(st.lists(segments, max_size=6).map("/".join), st.text(max_size=20))
tidy = st.lists(st.sampled_from(["a", "b", "ab", "a-b", "a b", "a!"]), min_size=1, max_size=4).map("/".join)


@given(listed)
def test_a_normalised_path_is_always_safe(path: str) -> None:
    try:
        normal = normalise_path(path)
    except UnsafePathError as error:
        assert str(error).isprintable()  # noqa: PT017 - most texts are refused, and that is a result as well
        return
    assert not normal.startswith("/")
    assert not {"", ".", ".."} & set(normal.split("/"))
    assert not {"\0", "\\"} & set(normal)
    assert max(len(segment.encode()) for segment in normal.split("/")) <= 255
    assert posixpath.normpath(f"/view/{normal}") == f"/view/{normal}"
    assert posixpath.normpath(path) == normal
    assert normalise_path(normal) == normal


@given(tidy)
def test_a_tidy_path_is_its_own_normal_form(path: str) -> None:
    assert normalise_path(path) == path


@given(st.lists(tidy, max_size=7))
def test_a_tree_is_accepted_exactly_when_no_path_equals_or_lies_inside_another(paths: list[str]) -> None:
    collides = any(
        one == other or one.startswith(f"{other}/")
        for at, one in enumerate(paths)
        for other in paths[:at] + paths[at + 1 :]
    )
    if collides:
        with pytest.raises(UnsafePathError):
            check_tree(paths)
    else:
        check_tree(paths)


@given(st.one_of(listed, listed.map("/{}".format)))
def test_a_normalised_mount_is_always_absolute_below_the_root_and_stable(location: str) -> None:
    try:
        normal = normalise_mount(location)
    except InvalidMountError:
        return
    assert normal.startswith("/")
    assert not {"", ".", ".."} & set(normal.split("/")[1:])
    assert "\0" not in normal
    assert normalise_mount(normal) == normal
    assert posixpath.normpath(location).replace("//", "/") == normal


@given(st.lists(tidy.map("/{}".format), max_size=6))
def test_mounts_are_accepted_exactly_when_none_equals_or_lies_inside_another(mounts: list[str]) -> None:
    clashing = {
        one
        for at, one in enumerate(mounts)
        for other in mounts[:at] + mounts[at + 1 :]
        if one == other or one.startswith(f"{other}/")
    }
    if clashing:
        with pytest.raises(InvalidMountError) as caught:
            check_mounts(mounts)
        assert caught.value.mount_location in clashing
    else:
        check_mounts(mounts)
