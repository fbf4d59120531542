"""Documents that an owner keeps for its peers: not too many, and no layout for too long."""

from pathlib import Path

from bdn.core.chunk import Digest
from bdn.net.chunk_server.served_chunks import OpenChunk
from bdn.wire.http_fields import DocumentKind
from node_agent.fetch.owned_documents import KeptDocuments
from tests.support.agent.rig import Clock
from tests.support.content.names import named


def key(name: str) -> tuple[DocumentKind, Digest, str]:
    return "layout", named(name), "org"


def content_of(found: OpenChunk | None) -> bytes | None:
    if found is None:
        return None
    with found.file as file:
        file.seek(found.offset)
        return file.read()


def test_what_was_used_longest_ago_goes_when_there_is_too_much(tmp_path: Path) -> None:
    kept = KeptDocuments(tmp_path, most_bytes=25)
    for name in "ab":
        kept.keep(key(name), name.encode() * 10, is_packed=True)
    assert content_of(kept.open(key("a"))) == b"a" * 10
    kept.keep(key("c"), b"c" * 10, is_packed=False)
    assert [content_of(kept.open(key(name))) for name in "abc"] == [b"a" * 10, None, b"c" * 10]

    kept.keep(key("long"), b"d" * 1000, is_packed=True)  # the newest is kept, whatever its size
    assert [kept.open(key(name)) for name in "abc"] == [None] * 3
    opened = kept.open(key("long"))
    kept.close()
    assert content_of(opened) == b"d" * 1000  # who reads it reads on
    assert kept.open(key("long")) is None
    assert not any(tmp_path.iterdir())


def test_not_more_files_are_open_than_256(tmp_path: Path) -> None:
    kept = KeptDocuments(tmp_path)
    for number in range(300):
        kept.keep(key(str(number)), b"short", is_packed=True)
    opened = [kept.open(key(str(number))) for number in range(300)]
    assert [content_of(one) for one in opened] == [None] * 44 + [b"short"] * 256
    kept.close()


def test_a_document_is_too_old_for_who_wants_a_newer_one(tmp_path: Path) -> None:
    clock = Clock()
    kept = KeptDocuments(tmp_path, clock=clock)
    kept.keep(key("a"), b"old", is_packed=True)
    clock.now += 100
    assert content_of(kept.open(key("a"), longest_seconds=100)) == b"old"
    clock.now += 1
    assert kept.open(key("a"), longest_seconds=100) is None
    assert content_of(kept.open(key("a"))) == b"old"

    kept.keep(key("a"), b"new", is_packed=True)
    assert content_of(kept.open(key("a"), longest_seconds=100)) == b"new"
    kept.close()
