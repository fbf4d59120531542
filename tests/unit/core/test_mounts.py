"""Where files of a request may stand."""

import pytest

from bdn.core.errors import InvalidMountError
from bdn.core.source.uri import WeightsSource, check_mounts, normalise_mount, parse_source

SOURCE = parse_source("s3://bucket/x")


@pytest.mark.parametrize(("location", "normal"), [
    ("/models", "/models"), ("/models/", "/models"), ("//models///a", "/models/a"), ("/./models/./a/.", "/models/a"),
    ("/a b/тест", "/a b/тест"), ("/..a/b..", "/..a/b.."), ("/...", "/..."), (f"/{'x' * 255}", f"/{'x' * 255}"),
])  # fmt: skip
def test_a_mount_is_absolute_without_empty_or_dot_segments(location: str, normal: str) -> None:
    assert normalise_mount(location) == normal
    assert normalise_mount(normal) == normal


@pytest.mark.parametrize(("reason", "locations"), [
    ("absolute path", ["", "models", "./models", " /models", "~/models"]),
    ("root directory", ["/", "//", "/.", "/./"]),
    ("'..'", ["/..", "/a/../b", "/a/.."]),
    ("NUL", ["/a\0b"]),
    ("255 bytes", [f"/{'x' * 256}", f"/{'é' * 128}"]),
])  # fmt: skip
def test_any_other_mount_is_refused_with_the_reason(reason: str, locations: list[str]) -> None:
    for location in locations:
        with pytest.raises(InvalidMountError, match=reason) as caught:
            normalise_mount(location)
        assert caught.value.details()["mount_location"] == location


def test_a_source_holds_a_normalised_mount() -> None:
    assert WeightsSource(SOURCE, "/m").mount_location == "/m"
    with pytest.raises(InvalidMountError, match="not normalised"):
        WeightsSource(SOURCE, "/m/")
    with pytest.raises(InvalidMountError, match="absolute"):
        WeightsSource(SOURCE, "m")


@pytest.mark.parametrize(("locations", "named"), [
    (["/a", "/a"], "/a"), (["/x", "/a", "/b", "/a"], "/a"), (["/a", "/a/b"], "/a/b"),
    (["/a", "/a-b", "/a/b"], "/a/b"), (["/a", "/a b", "/a!", "/a/b/c"], "/a/b/c"), (["/a/b", "/a/c", "/a"], "/a/b"),
])  # fmt: skip
def test_equal_or_nested_mounts_are_refused_in_any_order(locations: list[str], named: str) -> None:
    for given in (locations, locations[::-1]):
        with pytest.raises(InvalidMountError) as caught:
            check_mounts(given)
        assert caught.value.mount_location == named


@pytest.mark.parametrize(
    "pair", [("/m", "/m/"), ("/m", "//m"), ("/m", "/./m"), ("/m/", "/m/sub/"), ("/m//", "/m/./sub")]
)
def test_mounts_are_compared_after_normalising(pair: tuple[str, str]) -> None:
    with pytest.raises(InvalidMountError, match=r"stands twice|lies inside"):
        check_mounts([normalise_mount(location) for location in pair])
