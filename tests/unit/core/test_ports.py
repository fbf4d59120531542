"""What the values at the borders of parts promise by themselves."""

from bdn.core.ports import Location


def test_a_location_never_shows_its_address_or_headers() -> None:
    location = Location("https://host/key?X-Amz-Signature=SECRET", (("Authorization", "Bearer SECRET"),), '"etag"')
    assert "SECRET" not in f"{location} {location!r}"
    assert "etag" in repr(location)
