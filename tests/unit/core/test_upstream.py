"""What a listing tells without reading a byte, and what a location never shows."""

from bdn.core.source.upstream import Checksum, ChecksumKind, Identity, Listing, Location, UpstreamFile

CHECKSUM = Checksum(ChecksumKind.SHA256, "00" * 32)


def test_the_key_of_an_identity_is_64_hexadecimal_digits_and_stable() -> None:
    key = Identity.of("public", "hf", "o/r", "sha").key
    assert key == Identity.of("public", "hf", "o/r", "sha").key
    assert len(key) == 64
    assert set(key) <= set("0123456789abcdef")


def test_a_listing_gives_back_what_was_put_in_and_knows_whether_it_is_in_order() -> None:
    files = [
        UpstreamFile(f"{n:04}", n, Identity.of("public", str(n)), f"data/{n}", "v", CHECKSUM if n % 2 else None)
        for n in range(1201)
    ]
    listing = Listing(files)
    assert list(listing) == files
    assert [file for page in listing.pages() for file in page] == files
    assert (len(listing), listing.bytes_total) == (1201, 1200 * 1201 // 2)
    assert listing.is_sorted
    assert not Listing(reversed(files)).is_sorted
    assert not Listing([files[0], files[0]]).is_sorted


def test_a_location_never_shows_its_address_or_headers() -> None:
    location = Location("https://host/key?X-Amz-Signature=SECRET", (("Authorization", "Bearer SECRET"),), '"etag"')
    assert "SECRET" not in f"{location} {location!r}"
    assert "etag" in repr(location)
