from pathlib import Path

from bdn.core.cache.index import CacheIndex
from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.core.layout import Manifest
from node_agent.cache.held_chunks import HeldChunks
from node_agent.cache.quarantine import SuspectFiles
from node_agent.cache.records import ManifestRecords
from node_agent.disk.places import Places
from tests.support.agent.cache import a_tier, cached, put, whole_files
from tests.support.content.layouts import pieces
from tests.support.content.noise import MIB, noise

LARGE = noise(17 * MIB + 3, 1)


def shelf_of(places: Places, *manifests: Manifest, suspects: SuspectFiles | None = None) -> HeldChunks:
    index = CacheIndex()
    shelf = HeldChunks(whole_files(places), index, a_tier(places.root), (suspects or SuspectFiles()).add)
    for manifest in manifests:
        present = dict.fromkeys(manifest.contents, True)
        index.restore(manifest.digest, manifest.contents, present, last_used=0)
        held = ManifestRecords(places).load(manifest.digest)
        assert held is not None
        shelf.add(held)
    return shelf


def read(shelf: HeldChunks, digest: Digest) -> bytes:
    chunk = shelf.open(digest)
    assert chunk is not None
    with chunk.file:
        chunk.file.seek(chunk.offset)
        return chunk.file.read(chunk.size)


def test_every_chunk_is_found_at_its_place_in_a_whole_file(tmp_path: Path) -> None:
    places, manifest = cached(tmp_path, {"large": LARGE, "small": b"small", "empty": b""})
    shelf = shelf_of(places, manifest)

    for piece in (*pieces(LARGE), b"small", b""):
        assert read(shelf, digest_of(piece)) == piece


def test_what_somebody_wrote_into_is_suspected_and_not_served(tmp_path: Path) -> None:
    places, manifest = cached(tmp_path, {"large": LARGE, "small": b"small"})
    suspects = SuspectFiles()
    shelf = shelf_of(places, manifest, suspects=suspects)
    for digest in manifest.contents:
        path = places.file(digest)
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.write(b"?")

    assert not any(shelf.holds(digest_of(piece)) for piece in (*pieces(LARGE), b"small"))
    assert set(suspects.all()) == set(manifest.contents)


def test_a_large_file_is_not_a_chunk(tmp_path: Path) -> None:
    places, manifest = cached(tmp_path, {"large": LARGE})
    shelf = shelf_of(places, manifest)

    assert shelf.open(manifest.files[0].digest) is None


def test_a_chunk_stays_as_long_as_some_manifest_has_it(tmp_path: Path) -> None:
    places, one = cached(tmp_path, {"large": LARGE})
    two = put(places, {"elsewhere": LARGE})
    shelf, chunk = shelf_of(places, one, two), digest_of(LARGE[:CHUNK_SIZE])

    shelf.remove(one.digest)
    assert read(shelf, chunk) == LARGE[:CHUNK_SIZE]
    shelf.remove(two.digest)
    assert shelf.open(chunk) is None


def test_what_is_not_whole_yet_is_not_served(tmp_path: Path) -> None:
    places, manifest = cached(tmp_path, {"large": LARGE})
    places.file(manifest.files[0].digest).rename(places.part(manifest.files[0].digest))

    assert shelf_of(places, manifest).open(digest_of(LARGE[:CHUNK_SIZE])) is None


def test_a_chunk_that_stands_in_several_places_is_found_as_long_as_one_is_left(tmp_path: Path) -> None:
    zeros, chunk = bytes(CHUNK_SIZE), digest_of(bytes(CHUNK_SIZE))
    places, one = cached(tmp_path, {"file": zeros * 2})
    two = put(places, {"file": zeros + LARGE, "again": zeros * 2})
    shelf = shelf_of(places, one, two)
    shelf.remove(one.digest)
    assert read(shelf, chunk) == zeros
    assert shelf.named_by(chunk) == {one.digest, two.digest}  # the index still has it
    places.file(one.files[0].digest).unlink()
    assert read(shelf, chunk) == zeros
    shelf.remove(two.digest)
    assert shelf.open(chunk) is None
    assert shelf.open(digest_of(LARGE[:CHUNK_SIZE])) is None


def test_documents_of_a_manifest_are_served_as_long_as_it_is_held(tmp_path: Path) -> None:
    places, manifest = cached(tmp_path, {"small": b"small"})
    shelf, held = shelf_of(places, manifest), ManifestRecords(places).load(manifest.digest)
    assert held is not None
    (page,) = held.root.pages

    assert read(shelf, manifest.digest) == held.root.content
    assert read(shelf, page.digest) == held.pages[0]
    assert shelf.named_by(page.digest) == shelf.named_by(manifest.digest) == {manifest.digest}
    assert shelf.has_whole(page.digest)

    shelf.remove(manifest.digest)
    assert shelf.open(manifest.digest) is shelf.open(page.digest) is None
    assert not shelf.named_by(page.digest)


def test_a_damaged_document_is_not_read(tmp_path: Path) -> None:
    places, manifest = cached(tmp_path, {"small": b"small"})
    shelf = shelf_of(places, manifest)
    root = places.manifest(manifest.digest)
    size = root.stat().st_size
    root.write_bytes(b" " * size)

    assert shelf.read_held(manifest.digest, memoryview(bytearray(size))) is None
    assert not shelf.is_right(manifest.digest)
