"""Names of content."""

import pytest
from blake3 import blake3

from bdn.core.chunk import EMPTY, Digest, digest_of, file_digest

HEX = "0123456789abcdef" * 4


def test_a_digest_is_written_with_its_algorithm_and_read_back() -> None:
    assert str(Digest(HEX)) == f"b3:{HEX}"
    assert Digest.parse(f"b3:{HEX}") == Digest(HEX)


def test_a_digest_is_the_blake3_of_the_bytes_whatever_buffer_holds_them() -> None:
    expected = blake3(b"weights").hexdigest()
    assert {digest_of(b"weights"), digest_of(bytearray(b"weights")), digest_of(memoryview(b"weights"))} == {
        Digest(expected)
    }


def test_the_digest_of_nothing_is_the_published_one() -> None:
    assert EMPTY.hex == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_the_fan_out_is_two_folders_and_the_whole_name() -> None:
    assert Digest(HEX).fanout == f"01/23/{HEX}"


@pytest.mark.parametrize(
    "text",
    ["", HEX, f"b3:{HEX.upper()}", f"b3:{HEX[:-1]}", f"b3:{HEX}0", f"b3:{HEX}\n", f" b3:{HEX}", f"sha256:{HEX}", "b3:"],
)
def test_any_other_form_of_digest_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a digest"):
        Digest.parse(text)


@pytest.mark.parametrize("text", ["", HEX.upper(), HEX[:-1], f"{HEX}\n", f"b3:{HEX}", "../" * 21 + "x"])
def test_a_digest_cannot_be_made_from_anything_but_64_hexadecimal_digits(text: str) -> None:
    with pytest.raises(ValueError, match="not a digest"):
        Digest(text)


def test_a_refused_digest_is_shown_shortened() -> None:
    with pytest.raises(ValueError, match="not a digest") as caught:
        Digest.parse("x" * 10_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("raw", [b"", b"x" * 31, b"x" * 33])
def test_raw_bytes_of_another_length_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="not a digest"):
        Digest.from_bytes(raw)


def test_a_small_file_is_named_like_its_only_chunk_or_like_nothing() -> None:
    assert file_digest(0, []) == EMPTY
    assert file_digest(7, [digest_of(b"weights")]) == digest_of(b"weights")


def test_the_name_of_a_larger_file_depends_on_size_order_and_every_chunk() -> None:
    one, two, three = (digest_of(word) for word in (b"one", b"two", b"three"))
    names = {
        file_digest(9_000_000, [one, two]), file_digest(9_000_001, [one, two]), file_digest(9_000_000, [two, one]),
        file_digest(9_000_000, [one, three]), file_digest(9_000_000, [one, one]),
        file_digest(9_000_000, [one, two, three]),
    }  # fmt: skip
    assert len(names) == 6


@pytest.mark.parametrize("prefix", [b"", b"bdn:file:v1", b"bdn:file:v1\0"])
@pytest.mark.parametrize("with_size", [False, True])
def test_a_small_file_that_spells_out_a_large_files_digests_has_another_name(prefix: bytes, with_size: bool) -> None:
    """Otherwise whoever uploads the small file owns the name of the large one in every shared cache."""
    size, chunks = 9_000_000, [digest_of(b"one"), digest_of(b"two")]
    spelled = prefix + (size.to_bytes(8, "big") if with_size else b"") + b"".join(c.to_bytes() for c in chunks)
    assert file_digest(len(spelled), [digest_of(spelled)]) != file_digest(size, chunks)


def test_the_name_of_a_larger_file_is_stable() -> None:
    """The rule is part of the format: whoever changes it orphans every mirrored file."""
    chunks = [digest_of(b"one"), digest_of(b"two")]
    hasher = blake3(derive_key_context="bdn:file:v1")
    hasher.update((9_000_000).to_bytes(8, "big") + chunks[0].to_bytes() + chunks[1].to_bytes())
    assert file_digest(9_000_000, chunks).hex == hasher.hexdigest()
    assert file_digest(9_000_000, iter(chunks)).hex == (
        "32e1c9cd83ff6b592dd4f48bd33195b8aa7f45959135319c4641be3295335bd6"
    )
