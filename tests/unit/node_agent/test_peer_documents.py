"""Manifests and layouts come from whichever peer has the right ones; a silent mirror costs a moment."""

import asyncio
import gzip
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bdn.core.chunk import FileEntry, Manifest
from bdn.core.errors import BdnError
from bdn.core.pace.retry import RetryPolicy
from bdn.net.api_clients import MirrorClient
from bdn.wire.heartbeat_schema import MemberDocument
from bdn.wire.layout_form import Layout, LayoutBody
from node_agent.cache.records import ManifestRecords
from node_agent.disk.places import Places
from node_agent.fetch.documents import Catalogue, PeerDocuments
from node_agent.fetch.peers import Members, Peers
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import IMPATIENT
from tests.support.content.names import named
from tests.support.network.raw_server import Play, RawServer, read_head
from tests.support.promises.tally import Tally

FILES = {"a": b"first", "b": b"second", "c": bytes(9_000_000)}
DEAD = "http://127.0.0.1:1"


@pytest.fixture
def peer() -> Iterator[AgentMirror]:
    """Its documents are served as an agent's are."""
    with AgentMirror().running() as running:
        yield running


def members(folder: Path, *addresses: str) -> Members:
    known = Members("me", folder / "members.json")
    known.take(1, [MemberDocument(node="me", advertise=DEAD, roles=["cluster"])], known.ask())
    several = [
        MemberDocument(node=f"peer-{number}", advertise=one, roles=["cluster"]) for number, one in enumerate(addresses)
    ]
    known.take(2, several, known.ask())
    return known


async def test_the_peer_that_has_them_is_found_among_those_that_have_not(tmp_path: Path, peer: AgentMirror) -> None:
    manifest = peer.publish(FILES)
    with ExitStack() as stack:
        empty = [stack.enter_context(AgentMirror(signer=peer.signer).running()) for _ in range(2)]
        known = members(tmp_path, DEAD, DEAD, DEAD, *(one.url for one in empty), peer.url)

        found, layout = await _held(known, manifest, peer.grant(manifest))

    assert found == manifest
    assert layout is not None
    assert layout.covers(manifest.contents)


async def test_nobody_has_what_nobody_gives(tmp_path: Path, peer: AgentMirror) -> None:
    manifest = peer.publish(FILES)
    for known in (members(tmp_path), members(tmp_path, DEAD), members(tmp_path, peer.url)):
        documents = PeerDocuments(Peers(known, 16))
        assert await documents.held(documents.manifest(named("another"), peer.grant(manifest))) is None
        assert await documents.held(documents.layout(manifest, "no grant")) is None


async def test_another_manifest_under_this_name_is_not_taken(tmp_path: Path, peer: AgentMirror) -> None:
    manifest = peer.publish(FILES)
    peer.manifests[manifest.digest] = Manifest.of([FileEntry("a", 5, named("other"))])

    assert (await _held(members(tmp_path, peer.url), manifest, peer.grant(manifest)))[0] is None


async def test_a_layout_that_leaves_out_a_file_is_not_taken(tmp_path: Path, peer: AgentMirror) -> None:
    manifest = peer.publish(FILES)
    whole = peer.layouts[manifest.digest]
    peer.layouts[manifest.digest] = LayoutBody(manifest=whole.manifest, data_port=None, files=whole.files[1:])

    assert (await _held(members(tmp_path, peer.url), manifest, peer.grant(manifest)))[1] is None


def endless(head: bytes, piece: bytes, sent: list[int]) -> Play:
    """``head`` and then ``piece`` again and again, 200 MB of them, until nobody reads on."""

    def play(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(head)
        for _ in range(200_000_000 // len(piece)):
            connection.sendall(piece)
            sent.append(len(piece))

    return play


ENDLESS = {
    "plain": (b"HTTP/1.1 200 OK\r\n\r\n", b" " * 100_000),
    "packed": (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n", gzip.compress(bytes(10_000_000))),
    "an error": (b"HTTP/1.1 404 Not Found\r\n\r\n", b" " * 100_000),
}


@pytest.mark.promise("hostile-input")
@pytest.mark.parametrize("form", ENDLESS)
async def test_a_document_without_end_is_not_read_to_its_end(
    tmp_path: Path, peer: AgentMirror, form: str, tally: Tally
) -> None:
    manifest, sent = peer.publish(FILES), list[int]()
    with RawServer(*[endless(*ENDLESS[form], sent)] * 2) as server:
        async with asyncio.timeout(60):
            found = await _held(members(tmp_path, server.url), manifest, peer.grant(manifest), most_bytes=1_000_000)
            assert found == (None, None)

    tally.add(scenarios=2, refused=2)
    assert sum(sent) < 50_000_000  # what lay in the buffers of two connections


@pytest.mark.promise("hostile-input")
def test_the_longest_layout_of_its_contents_is_shorter_than_may_be(tally: Tally) -> None:
    for is_packed, count in ((False, 1), (True, 1), (False, 400), (True, 400)):
        mirror = AgentMirror(is_packed=is_packed)
        manifest = mirror.publish({f"{number}": f"{number}".encode() for number in range(count)} | FILES)
        document = mirror.layouts[manifest.digest].model_dump_json().encode()
        assert len(document) < Layout.most_bytes(manifest.contents) < 10 * len(document)
        tally.add(scenarios=1)


@pytest.fixture
def silent() -> Iterator[str]:
    """A host that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_mirror_that_says_nothing_is_not_waited_for_where_a_peer_knows(
    tmp_path: Path, peer: AgentMirror, silent: str
) -> None:
    manifest = peer.publish(FILES)
    async with asyncio.timeout(20), MirrorClient(silent) as client:
        catalogue = _catalogue(tmp_path, client, IMPATIENT, peer.url)
        held = await catalogue.obtain(manifest.digest, peer.grant(manifest), is_complete=False)

    assert held.manifest == manifest
    assert held.layout is not None


async def test_a_mirror_that_says_nothing_to_anybody_is_named(tmp_path: Path, silent: str) -> None:
    async with asyncio.timeout(20), MirrorClient(silent) as client:
        catalogue = _catalogue(tmp_path, client, RetryPolicy(outage_seconds=0, attempts=1))
        with pytest.raises(BdnError, match=silent) as caught:
            await catalogue.obtain(named("any"), "grant", is_complete=False)

    assert (caught.value.code, caught.value.transient) == ("STORE_UNAVAILABLE", True)


async def _held(
    known: Members, manifest: Manifest, grant: str, most_bytes: int = 2**30
) -> tuple[Manifest | None, Layout | None]:
    """What the members give who hold it."""
    documents = PeerDocuments(Peers(known, 16), most_bytes)
    found = await documents.held(documents.manifest(manifest.digest, grant))
    layout = await documents.held(documents.layout(manifest, grant))
    return found and found[0], layout and layout[0]


def _catalogue(folder: Path, client: MirrorClient, policy: RetryPolicy, *peers: str) -> Catalogue:
    places = Places(folder / "cache", None)
    places.make()
    asked = PeerDocuments(Peers(members(folder, *peers), 16))
    return Catalogue(ManifestRecords(places), client, asked, policy, answer_seconds=(0.2, 0.2))
