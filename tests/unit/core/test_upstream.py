"""What a listing tells without reading a byte, and what a location never shows."""

from bdn.core.source.upstream import Identity, Location, UpstreamFile, diff
from tests.support.content.names import named


def listed(path: str, *parts: str, scope: str = "public") -> UpstreamFile:
    return UpstreamFile(path, 1, Identity.of(scope, *parts), handle=path, version="v")


def test_the_key_of_an_identity_is_64_hexadecimal_digits_and_stable() -> None:
    key = Identity.of("public", "hf", "o/r", "sha").key
    assert key == Identity.of("public", "hf", "o/r", "sha").key
    assert len(key) == 64
    assert set(key) <= set("0123456789abcdef")


def test_held_files_are_known_by_path_and_the_others_are_missing_in_order() -> None:
    held, first, second = listed("a", "1"), listed("b", "2"), listed("c", "3")
    result = diff([held, first, second], {held.identity.key: named("content")})
    assert result.held == {"a": named("content")}
    assert result.missing == (first, second)


def test_an_identity_listed_at_two_paths_is_copied_once_and_held_twice() -> None:
    one, two = listed("a", "1"), listed("b", "1")
    assert diff([one, two], {}).missing == (one,)
    assert diff([one, two], {one.identity.key: named("x")}).held == {"a": named("x"), "b": named("x")}


def test_what_another_organisation_holds_is_missing() -> None:
    mine, theirs = listed("a", "1", scope="org-1"), listed("a", "1", scope="org-2")
    assert diff([mine], {theirs.identity.key: named("x")}).missing == (mine,)


def test_a_location_never_shows_its_address_or_headers() -> None:
    location = Location("https://host/key?X-Amz-Signature=SECRET", (("Authorization", "Bearer SECRET"),), '"etag"')
    assert "SECRET" not in f"{location} {location!r}"
    assert "etag" in repr(location)
