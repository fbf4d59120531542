from collections.abc import Iterable, Mapping

from bdn.core.store import SlabNeeds


def needs(slabs: Mapping[str, tuple[str, str]], whole: Iterable[str] = (), damaged: Iterable[str] = ()) -> SlabNeeds:
    """From the slabs' scopes and the letters in each: ``{"S": ("public", "ab")}``. Every slab is 10 bytes."""
    found = SlabNeeds()
    for slab, (scopes, inside) in slabs.items():
        found.add_slab(slab, 10)
        for scope in scopes.split():
            found.add_scope(slab, scope)
        for content in inside:
            found.add_slice(content, slab)
    for slab in damaged:
        found.add_damaged(slab)
    for content in whole:
        found.add_whole(content)
    return found


def test_a_slab_goes_with_the_last_of_its_contents() -> None:
    known = needs({"S": ("public", "abc")})
    assert [known.take("a"), known.take("b"), known.take("c")] == [[], [], ["S"]]


def test_asking_changes_nothing() -> None:
    known = needs({"S": ("public", "a"), "T": ("public", "ab")})
    assert known.going("a") == known.going("a") == ["S"]
    assert known.going("ab") == ["S", "T"]
    assert known.take("ab") == ["S", "T"]
    assert known.size(["S", "T"]) == 20


def test_a_damaged_slab_does_not_stand_in_and_nobody_needs_it_where_another_one_does() -> None:
    slabs = {"S": ("public", "ax"), "T": ("public", "bx")}
    assert needs(slabs, damaged="T").take("a") == []
    assert needs(slabs, damaged="S").take("a") == ["S"]
    assert needs(slabs, damaged="S").take("b") == []


def test_what_went_before_does_not_stand_in() -> None:
    known = needs({"S": ("public", "ab"), "T": ("public", "bc")})
    assert known.take("a") == ["S"]
    known.add_slice("b", "S")  # told again, as the database still says so
    known.add_slice("a", "T")
    assert known.take("c") == []
    assert known.take("b") == ["T"]
