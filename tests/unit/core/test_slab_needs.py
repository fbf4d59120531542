from collections.abc import Iterable, Mapping

from bdn.core.store.slabs import SlabNeeds


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


def test_what_lies_elsewhere_in_the_same_scope_does_not_keep_a_slab() -> None:
    assert needs({"S": ("public", "ab"), "T": ("public", "b")}).take("a") == ["S"]


def test_of_two_slabs_that_could_stand_in_for_each_other_one_stays() -> None:
    known = needs({"S": ("public", "axb"), "T": ("public", "axb")})
    assert known.take("ab") == ["S"]
    assert known.take("x") == ["T"]


def test_what_is_whole_by_itself_does_not_keep_a_slab() -> None:
    assert needs({"S": ("public", "ab")}, whole="b").take("a") == ["S"]


def test_a_damaged_slab_does_not_stand_in_and_nobody_needs_it_where_another_one_does() -> None:
    slabs = {"S": ("public", "ax"), "T": ("public", "bx")}
    assert needs(slabs, damaged="T").take("a") == []
    assert needs(slabs, damaged="S").take("a") == ["S"]
    assert needs(slabs, damaged="S").take("b") == []


def test_a_damaged_slab_stays_while_nothing_else_holds_what_lies_in_it() -> None:
    known = needs({"S": ("public", "ax"), "T": ("public", "bx")}, damaged="ST")
    assert known.take("ab") == []  # one of them may be repaired
    assert known.take("x") == ["S", "T"]


def test_a_slab_of_another_organisation_does_not_stand_in_and_a_public_one_does() -> None:
    assert needs({"S": ("x", "ab"), "T": ("y", "b")}).take("a") == []
    assert needs({"S": ("x", "ab"), "T": ("public", "b")}).take("a") == ["S"]
    assert needs({"S": ("public", "ab"), "T": ("x", "b")}).take("a") == []


def test_a_slab_of_two_scopes_is_needed_by_either() -> None:
    slabs = {"S": ("x y", "ab"), "T": ("x", "b")}
    assert needs(slabs).take("a") == []
    assert needs(slabs | {"U": ("y", "b")}).take("a") == ["S"]


def test_what_went_before_does_not_stand_in() -> None:
    known = needs({"S": ("public", "ab"), "T": ("public", "bc")})
    assert known.take("a") == ["S"]
    known.add_slice("b", "S")  # told again, as the database still says so
    known.add_slice("a", "T")
    assert known.take("c") == []
    assert known.take("b") == ["T"]
