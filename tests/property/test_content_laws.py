"""Chunks tile files, manifests survive a round trip, and names never collide."""

from hypothesis import given
from hypothesis import strategies as st

from bdn.core.chunk import (
    CHUNK_SIZE,
    EMPTY,
    ByteRange,
    Digest,
    FileLayout,
    chunk_count,
    chunk_range,
)
from bdn.core.source.upstream import Identity
from bdn.wire.stage_schema import stage_id_of
from tests.support.content.names import named

near_chunk_borders = st.builds(
    lambda chunks, off: max(1, chunks * CHUNK_SIZE + off), st.integers(0, 40), st.integers(-2, 2)
)


@given(st.one_of(near_chunk_borders, st.integers(1, 2**62)), st.data())
def test_chunks_tile_a_file_of_any_size(size: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, chunk_count(size) - 1))
    here = chunk_range(size, index)
    last = index == chunk_count(size) - 1
    assert here == ByteRange(index * CHUNK_SIZE, size if last else chunk_range(size, index + 1).start)
    assert here.size <= CHUNK_SIZE


few_chunks = st.lists(st.sampled_from([named("one"), named("two"), EMPTY]), max_size=4).map(tuple)


@given(few_chunks, few_chunks, st.integers(1, CHUNK_SIZE))
def test_a_layout_fits_one_file_alone(one: tuple[Digest, ...], other: tuple[Digest, ...], last: int) -> None:
    size = (len(one) - 1) * CHUNK_SIZE + last if one else 0
    layout = FileLayout.of(size, one)
    assert tuple(placed.digest for placed in layout.placed()) == one
    try:
        FileLayout(layout.digest, size, other)
    except ValueError:
        assert other != one
    else:
        assert other == one


@given(st.binary(min_size=32, max_size=32))
def test_a_digest_survives_both_of_its_forms(raw: bytes) -> None:
    digest = Digest.from_bytes(raw)
    assert Digest.parse(str(digest)) == digest
    assert digest.to_bytes() == raw
    assert (digest == EMPTY) == (raw == EMPTY.to_bytes())


# Digits and colons are what a careless encoding of lists would confuse.
parts = st.lists(st.text("a1:\0", max_size=4), max_size=4).map(tuple)
scopes = st.text("a1:\0", max_size=2)


@given(scopes, parts, scopes, parts)
def test_no_two_identities_share_a_key(
    scope: str, one: tuple[str, ...], other_scope: str, other: tuple[str, ...]
) -> None:
    same = (scope, one) == (other_scope, other)
    assert (Identity.of(scope, *one).key == Identity.of(other_scope, *other).key) == same


mounts = st.dictionaries(st.sampled_from(["/a", "/b", "/c"]), st.integers(0, 2), min_size=1)
requests = st.tuples(scopes, scopes, mounts)


@given(requests, requests)
def test_no_two_requests_share_a_stage(
    one: tuple[str, str, dict[str, int]], other: tuple[str, str, dict[str, int]]
) -> None:
    def stage_of(job_id: str, organisation: str, places: dict[str, int]) -> str:
        return stage_id_of(job_id, organisation, {at: str(named(str(m))) for at, m in places.items()})

    assert (stage_of(*one) == stage_of(*other)) == (one == other)
