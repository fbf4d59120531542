"""Whose a slab is, told from its last bytes."""

from hypothesis import given
from hypothesis import strategies as st

from bdn.core.store import SEAL_SIZE, is_closed_to, seal_of

NAMES = st.text(min_size=1, max_size=20)


@given(NAMES, NAMES)
def test_a_seal_opens_for_its_organisation_alone(owner: str, asking: str) -> None:
    assert is_closed_to(asking, seal_of(f"organisation:{owner}")) is (asking != owner)


@given(st.binary(max_size=2 * SEAL_SIZE), NAMES)
def test_what_ends_in_no_seal_is_open(tail: bytes, asking: str) -> None:
    assert not is_closed_to(asking, tail)


def test_public_slabs_have_none_and_all_others_are_as_long() -> None:
    assert seal_of("public") == b""
    assert {len(seal_of(f"organisation:{name}")) for name in ("", "a", "an-organisation" * 4)} == {SEAL_SIZE}
