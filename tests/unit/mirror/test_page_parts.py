"""Parts of a view: what a viewer receives who has seen an earlier snapshot."""

import pytest

from bdn.mirror.page.parts import Group, Part, Snapshot

LIVE = Part('<p id="live">now</p>')


def row(name: str, text: str) -> Part:
    return Part(f'<tr id="{name}"><td>{text}</td></tr>', "table")


def table(*rows: Part, head: str = "") -> Group:
    return Group(f'<table id="rows">{head}<tbody>', rows, "</tbody></table>")


def snapshot(*parts: Part | Group) -> Snapshot:
    return Snapshot({part.id: part for part in parts}, LIVE)


def test_since__same_content__sends_the_line_of_its_time_alone() -> None:
    before, after = snapshot(Part('<p id="a">1</p>')), snapshot(Part('<p id="a">1</p>'))

    assert after.since(before) == '<p hx-swap-oob="outerMorph" id="live">now</p>'
    assert after.name == before.name


def test_since__the_same_snapshot__sends_nothing() -> None:
    one = snapshot(Part('<p id="a">1</p>'))

    assert one.since(one) == ""


def test_since__one_part_changed__sends_that_one() -> None:
    before = snapshot(Part('<h1 id="a">1</h1>'), Part('<p id="b">1</p>'))
    after = snapshot(Part('<h1 id="a">2</h1>'), Part('<p id="b">1</p>'))

    assert after.since(before) == f'<h1 hx-swap-oob="outerMorph" id="a">2</h1>{LIVE.update}'
    assert after.name != before.name


def test_since__rows_changed__sends_them_within_a_table() -> None:
    before, after = snapshot(table(row("x", "1"), row("y", "1"))), snapshot(table(row("x", "1"), row("y", "2")))

    expected = '<table><tbody><tr hx-swap-oob="outerMorph" id="y"><td>2</td></tr></tbody></table>'
    assert after.since(before) == expected + LIVE.update


@pytest.mark.parametrize(
    "after",
    [
        table(row("x", "1")),
        table(row("x", "1"), row("y", "1"), row("z", "1")),
        table(row("y", "1"), row("x", "1")),
        table(row("x", "1"), row("z", "2")),
        table(row("x", "1"), row("y", "1"), head="<caption>2</caption>"),
    ],
)
def test_since__rows_came_went_or_moved__sends_the_whole_table(after: Group) -> None:
    sent = snapshot(after).since(snapshot(table(row("x", "1"), row("y", "1"))))

    assert sent == after.html.replace("<table id", '<table hx-swap-oob="outerMorph" id', 1) + LIVE.update


def test_since__a_part_that_was_not_there__is_sent() -> None:
    sent = snapshot(Part('<p id="a">1</p>'), table(row("x", "1"))).since(snapshot(Part('<p id="a">1</p>')))

    assert 'hx-swap-oob="outerMorph" id="rows"' in sent
    assert 'id="a"' not in sent


def test_whole__has_every_part() -> None:
    whole = snapshot(Part('<p id="a">1</p>'), table(row("x", "1"))).whole

    assert [name for name in ("a", "rows", "live") if f'hx-swap-oob="outerMorph" id="{name}"' in whole] == [
        "a",
        "rows",
        "live",
    ]


@pytest.mark.parametrize("html", ["", "text", "<p>", '<p class="x" id="a">', '\n<p id="a">', '<p id="a b">'])
def test_part__that_does_not_begin_with_a_tag_and_an_id__is_refused(html: str) -> None:
    with pytest.raises(ValueError, match="begin with a tag and an id"):
        _ = Part(html).id
