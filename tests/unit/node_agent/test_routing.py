from collections.abc import Iterable
from pathlib import Path

import pytest

from bdn.core.chunk import FileLayout, Slice
from bdn.core.layout import Layout
from node_agent.fetch.fill_context import LanePlace, Routing, chunks_in_order
from node_agent.fetch.peers import Members
from tests.support.agent.reader_chain import join
from tests.support.content.names import named

MIB = 1024 * 1024
SLAB = named("slab")
FILES = (
    FileLayout.of(20 * MIB, tuple(named(f"large-{number}") for number in range(3))),
    FileLayout.of(30 * MIB, (named("first"), named("large-0"), named("x"), named("y"))),
    FileLayout(named("small-1"), 10, (named("small-1"),), Slice(SLAB, MIB, 0)),
    FileLayout(named("small-2"), 10, (named("small-2"),), Slice(SLAB, MIB, 10)),
)


def layout_of(files: Iterable[FileLayout]) -> Layout:
    layout = Layout(named("manifest"))
    for file in files:
        layout.add(file)
    return layout


CHUNKS = chunks_in_order(layout_of(FILES))


@pytest.fixture
def members(tmp_path: Path) -> Members:
    return Members("me", tmp_path / "members.json")


def everyone(*names: str) -> dict[str, str]:
    return {name: f"http://{name}" for name in names}


def test_the_order_is_the_largest_first_each_chunk_once_and_slabs_whole() -> None:
    assert [*FILES[1].chunks, *FILES[0].chunks[1:], SLAB] == CHUNKS


def test_the_order_is_the_same_however_the_layout_is_written() -> None:
    assert chunks_in_order(layout_of(reversed(FILES))) == CHUNKS


@pytest.mark.parametrize("known", [(), ("me",)], ids=["nobody", "itself"])
def test_a_node_that_is_alone_reads_everything_from_the_mirror(members: Members, known: tuple[str, ...]) -> None:
    join(members, everyone(*known))
    routing = Routing(lambda: CHUNKS, members)
    routing.prepare()
    assert routing.count == 1
    assert not any(routing.peers(chunk, lambda _: False) or routing.is_mine(chunk) for chunk in CHUNKS)
    assert {routing.turn(chunk) for chunk in CHUNKS} == {LanePlace(is_own=True, position=0)}


def test_each_chunk_is_mine_or_a_peers_and_the_turns_say_the_same(members: Members) -> None:
    join(members, everyone("me", "a", "b"))
    routing = Routing(lambda: CHUNKS, members)
    routing.prepare()
    assert routing.count == 3
    for chunk in CHUNKS:
        assert routing.is_mine(chunk) == (not routing.peers(chunk, lambda _: False)) == routing.turn(chunk).is_own
    for is_own in (True, False):
        turns = [routing.turn(chunk) for chunk in CHUNKS]
        assert sorted(turn.position for turn in turns if turn.is_own == is_own) == list(
            range(sum(turn.is_own == is_own for turn in turns))
        )


def test_who_comes_and_goes_changes_the_owners_of_what_is_not_begun(members: Members) -> None:
    join(members, everyone("me"))
    routing = Routing(lambda: CHUNKS, members)
    routing.prepare()
    join(members, everyone("a"))
    assert [routing.peers(chunk, lambda _: False) for chunk in CHUNKS] == [("a",)] * len(CHUNKS)
    join(members, everyone("b"))
    assert [routing.peers(chunk, lambda _: False) for chunk in CHUNKS] == [("b",)] * len(CHUNKS)
    join(members, everyone())
    assert [routing.peers(chunk, lambda _: False) for chunk in CHUNKS] == [()] * len(CHUNKS)


def test_a_chunk_of_another_manifest_is_read_from_the_mirror(members: Members) -> None:
    join(members, everyone("a"))
    routing = Routing(lambda: CHUNKS, members)
    assert routing.peers(named("stranger"), lambda _: False) == ()
    assert routing.turn(named("stranger")) == LanePlace(is_own=True, position=0)


def test_where_tls_is_required_a_peer_in_the_clear_owns_nothing_and_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither when the mirror tells of it nor when the members of the last run are read; this machine's own are no wire away."""
    addresses = {
        "me": "http://10.0.0.1:8471",
        "plain": "http://10.0.0.2:8471",
        "here": "http://127.0.0.1:8472",
        "tls": "https://10.0.0.3:8471",
        "odd": "10.0.0.4:8471",
        "broken": "http://[::",
    }
    path = tmp_path / "members.json"
    join(Members("me", path), addresses)
    requiring = Members("me", path, requires_tls=True)
    requiring.load()
    for _ in range(2):
        assert [member.node for member in requiring.current().members] == ["here", "me", "tls"]
        join(requiring, addresses)
    named = [record.args for record in caplog.records if "BDN_AGENT_TLS=require" in record.getMessage()]
    assert named == [("broken",), ("odd",), ("plain",)]
