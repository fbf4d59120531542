"""Roots of manifests come from the mirror, this disk, or whichever peer has the right one; a silent mirror costs a moment."""

import asyncio
import gzip
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bdn.core.errors import BdnError
from bdn.core.layout import Manifest
from bdn.core.pace.retry import RetryPolicy
from bdn.net.api_clients import MirrorClient
from bdn.wire.heartbeat_schema import MemberDocument
from node_agent.cache.records import ManifestRecords
from node_agent.disk.places import Places
from node_agent.fetch.chain import MirrorPlane
from node_agent.fetch.documents import Catalogue, PeerRoots
from node_agent.fetch.peers import Members, Peers
from tests.support.agent.mirror import AgentMirror, flipped
from tests.support.agent.rig import IMPATIENT
from tests.support.content.names import named
from tests.support.content.noise import MIB, noise
from tests.support.network.raw_server import Play, RawServer, read_head
from tests.support.promises.tally import Tally

FILES = {"a": b"first", "b": b"second", "c": noise(9 * MIB + 1, 2)}
DEAD = "http://127.0.0.1:1"


@pytest.fixture
def peer() -> Iterator[AgentMirror]:
    """Its data plane serves roots as an agent's does."""
    with AgentMirror().running() as running:
        yield running


def plane_of(mirror: AgentMirror) -> str:
    return f"http://127.0.0.1:{mirror.data_port}"


def peers_at(folder: Path, *addresses: str) -> Peers:
    known = Members("me", folder / "members.json")
    told = [MemberDocument(node="me", advertise=DEAD, roles=["cluster"])]
    told += [MemberDocument(node=f"peer-{at}", advertise=one, roles=["cluster"]) for at, one in enumerate(addresses)]
    known.take(2, told, known.ask())
    return Peers(known, 16)


async def test_find__takes_the_root_from_the_peer_that_has_it(tmp_path: Path, peer: AgentMirror) -> None:
    manifest = peer.publish(FILES)
    with ExitStack() as stack:
        empty = [stack.enter_context(AgentMirror(signer=peer.signer).running()) for _ in range(2)]
        peers = peers_at(tmp_path, DEAD, DEAD, DEAD, *map(plane_of, empty), plane_of(peer))

        assert await PeerRoots(peers).find(manifest.digest, peer.grant(manifest)) == peer.trees[manifest.digest].root


async def test_find__returns_none_where_no_peer_has_it_for_this_grant(tmp_path: Path, peer: AgentMirror) -> None:
    manifest = peer.publish(FILES)
    for peers in (peers_at(tmp_path), peers_at(tmp_path, DEAD), peers_at(tmp_path, plane_of(peer))):
        assert await PeerRoots(peers).find(named("another"), peer.grant(manifest)) is None
        assert await PeerRoots(peers).find(manifest.digest, "no grant") is None


async def test_find__leaves_a_peer_alone_that_sent_a_wrong_root(tmp_path: Path, peer: AgentMirror) -> None:
    manifest, peers = peer.publish(FILES), peers_at(tmp_path, plane_of(peer))
    peer.faults[manifest.digest] = [flipped]

    assert await PeerRoots(peers).find(manifest.digest, peer.grant(manifest)) is None
    assert peers.avoided() == ("peer-0",)


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
async def test_find__does_not_read_an_answer_without_end(tmp_path: Path, form: str, tally: Tally) -> None:
    sent: list[int] = []
    with RawServer(endless(*ENDLESS[form], sent)) as server:
        async with asyncio.timeout(60):
            assert await PeerRoots(peers_at(tmp_path, server.url)).find(named("any"), "grant") is None

    tally.add(scenarios=1, refused=1)
    assert sum(sent) < 50_000_000  # what lay in the buffers of a connection


@pytest.fixture
def silent() -> Iterator[str]:
    """A host that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_root__is_a_peers_while_the_mirror_says_nothing(tmp_path: Path, peer: AgentMirror, silent: str) -> None:
    manifest = peer.publish(FILES)
    async with asyncio.timeout(60), MirrorClient(silent) as client:
        catalogue = catalogue_at(tmp_path, client, IMPATIENT, plane_of(peer))
        assert (await catalogue.root(manifest.digest, peer.grant(manifest))).digest == manifest.digest


async def test_root__names_the_mirror_that_says_nothing_where_no_peer_has_it(tmp_path: Path, silent: str) -> None:
    async with asyncio.timeout(60), MirrorClient(silent) as client:
        catalogue = catalogue_at(tmp_path, client, RetryPolicy(outage_seconds=0, attempts=1))
        with pytest.raises(BdnError, match=silent) as caught:
            await catalogue.root(named("any"), "grant")

    assert (caught.value.code, caught.value.transient) == ("STORE_UNAVAILABLE", True)


async def test_obtain__asks_the_mirror_how_chunks_are_read_also_where_all_documents_are_here(
    tmp_path: Path, peer: AgentMirror
) -> None:
    manifest = peer.publish(FILES)
    async with MirrorClient(peer.url) as client:
        catalogue = catalogue_at(tmp_path, client, IMPATIENT)
        catalogue.records.save(peer.trees[manifest.digest], 1000.0)
        held = await catalogue.obtain(manifest.digest, peer.grant(manifest), is_complete=False)

    assert held.manifest == manifest
    assert catalogue.chain.plane.current.port == peer.data_port
    assert peer.documents == {f"/manifests/{manifest.digest}": 1}


@pytest.mark.parametrize("is_down", [True, False])
async def test_obtain__takes_what_is_on_this_disk_whatever_the_mirror_answers(
    tmp_path: Path, peer: AgentMirror, is_down: bool
) -> None:
    manifest, tree = _of_another(peer)
    peer.down = is_down
    async with MirrorClient(peer.url) as client:
        catalogue = catalogue_at(tmp_path, client, IMPATIENT)
        catalogue.records.save(tree, 1000.0)
        assert (await catalogue.obtain(manifest.digest, peer.grant(manifest), is_complete=False)).manifest == manifest


async def test_obtain__does_not_ask_the_mirror_for_what_is_complete(tmp_path: Path, peer: AgentMirror) -> None:
    manifest = peer.publish(FILES)
    async with MirrorClient(peer.url) as client:
        catalogue = catalogue_at(tmp_path, client, IMPATIENT)
        catalogue.records.save(peer.trees[manifest.digest], 1000.0)
        await catalogue.obtain(manifest.digest, "no grant", is_complete=True)

    assert not peer.documents


def _of_another(peer: AgentMirror) -> tuple[Manifest, Any]:
    """A manifest that this mirror does not have any more."""
    manifest = peer.publish(FILES)
    return manifest, peer.trees.pop(manifest.digest)


def catalogue_at(folder: Path, client: MirrorClient, policy: RetryPolicy, *addresses: str) -> Catalogue:
    places = Places(folder / "cache", None)
    places.make()
    peers = PeerRoots(peers_at(folder, *addresses))
    chain, threads = cast("Any", SimpleNamespace(plane=MirrorPlane())), cast("Any", None)
    return Catalogue(ManifestRecords(places), client, peers, chain, threads, policy, answer_seconds=(0.2, 0.2))
