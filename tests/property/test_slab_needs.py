"""Whatever goes in whatever order: what stays is readable by everybody who could read it, and nothing is kept for nothing.

What is damaged is read by nobody, and kept for those who have nothing else: it may be repaired.
"""

from hypothesis import given
from hypothesis import strategies as st

from bdn.core.store import SlabNeeds

SCOPES = ("public", "organisation:a", "organisation:b")
CONTENTS = "abcd"  # few, so that they often lie in several slabs
Slabs = dict[str, tuple[set[str], set[str]]]
slabs_strategy = st.lists(
    st.tuples(st.sets(st.sampled_from(SCOPES), min_size=1), st.sets(st.sampled_from(CONTENTS), min_size=1)),
    min_size=1,
    max_size=5,
)


def readers(content: str, slabs: Slabs, whole: set[str]) -> set[str]:
    """The scopes that can read a content, where none of these slabs is damaged."""
    if content in whole:
        return set(SCOPES)
    found = {scope for scopes, inside in slabs.values() if content in inside for scope in scopes}
    return set(SCOPES) if "public" in found else found


def without(slabs: Slabs, some: set[str]) -> Slabs:
    return {slab: held for slab, held in slabs.items() if slab not in some}


@given(
    slabs_strategy,
    st.sets(st.sampled_from("01234")),
    st.sets(st.sampled_from(CONTENTS), max_size=2),
    st.lists(st.sets(st.sampled_from(CONTENTS), min_size=1, max_size=2), max_size=4),
)
def test_what_stays_can_be_read_and_what_nobody_needs_goes(
    given_slabs: list[tuple[set[str], set[str]]], damaged: set[str], whole: set[str], steps: list[set[str]]
) -> None:
    slabs = {str(number): slab for number, slab in enumerate(given_slabs)}
    needs = SlabNeeds()
    for slab, (scopes, inside) in slabs.items():
        needs.add_slab(slab, 1)
        for scope in scopes:
            needs.add_scope(slab, scope)
        for content in inside:
            needs.add_slice(content, slab)
    for slab in damaged:
        needs.add_damaged(slab)
    for content in whole:
        needs.add_whole(content)
    staying = set(CONTENTS)
    for step in [*steps, set(CONTENTS)]:
        going = step & staying
        before = {content: readers(content, without(slabs, damaged), whole) for content in staying}
        once_repaired = {content: readers(content, slabs, whole) for content in staying}
        touched = {slab for slab, (_, inside) in slabs.items() if inside & going}
        expected = needs.going(going)
        assert needs.take(going) == expected
        assert set(expected) <= touched
        staying -= going
        slabs = {slab: (scopes, inside - going) for slab, (scopes, inside) in slabs.items() if slab not in expected}
        for content in staying:
            assert readers(content, without(slabs, damaged), whole) == before[content]
            assert readers(content, slabs, whole) == once_repaired[content]
        for slab in touched & slabs.keys():  # every one that stays is there for somebody
            others = without(slabs, damaged | {slab})
            assert any(
                scope not in readers(content, others, whole) for content in slabs[slab][1] for scope in slabs[slab][0]
            )
    assert not any(inside for _, inside in slabs.values())
