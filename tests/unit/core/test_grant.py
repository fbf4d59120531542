"""What an agent may read, and the name of the stage that this makes."""

import pytest

from bdn.core.errors import InvalidMountError
from bdn.core.grant import Grant, GrantedMount, stage_id_of
from tests.support.content.names import named

A, B = named("a"), named("b")


def mount(location: str, manifest: str = "a", source: str = "hf://o/r") -> GrantedMount:
    return GrantedMount(location, named(manifest), source)


def test_a_grant_allows_the_manifests_that_it_names_and_no_other() -> None:
    grant = Grant("org", (mount("/x", "a"), mount("/y", "b")), 100.0)
    assert grant.allows(A)
    assert grant.allows(B)
    assert not grant.allows(named("c"))


def test_a_grant_names_at_least_one_mount() -> None:
    with pytest.raises(ValueError, match="at least one mount"):
        Grant("org", (), 100.0)


@pytest.mark.parametrize("locations", [("/x", "/x"), ("/x/y", "/x")])
def test_the_mounts_of_a_grant_are_neither_equal_nor_nested(locations: tuple[str, str]) -> None:
    with pytest.raises(InvalidMountError):
        Grant("org", tuple(mount(location) for location in locations), 100.0)


def test_one_manifest_may_stand_at_two_places() -> None:
    assert Grant("org", (mount("/x"), mount("/y")), 100.0).allows(A)


def test_a_granted_mount_is_normalised() -> None:
    with pytest.raises(ValueError, match="not normalised"):
        mount("/x/")
    with pytest.raises(InvalidMountError):
        mount("x")


def test_equal_content_gives_an_equal_stage_id_in_any_order_of_mounts() -> None:
    first, second = mount("/x", "a"), mount("/y", "b")
    stage_id = stage_id_of("job", "org", [first, second])
    assert stage_id == stage_id_of("job", "org", [second, first])
    assert stage_id.startswith("stg_")
    assert len(stage_id) == 28


def test_where_the_files_came_from_does_not_change_the_stage() -> None:
    assert stage_id_of("job", "org", [mount("/x", source="a")]) == stage_id_of("job", "org", [mount("/x", source="b")])
