"""Small files rest in slabs: recorded, found, read back and forgotten, and nobody reads a neighbour's."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import delete, func, select

from bdn.core.chunk import CHUNK_SIZE, Digest, FileEntry, FileLayout, Manifest, Slab, digest_of
from bdn.core.source.upstream import Identity
from bdn.core.store import SEAL_SIZE, StoredChunk, seal_of
from bdn.mirror.db import contents, damaged, mirrors, removal
from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import DamagedChunkRow, MirrorRow, MirrorSourceRow, SlabScopeRow, SlabSliceRow
from bdn.wire.grants import Grant, GrantedMount, GrantSigner
from bdn.wire.layout_form import Layout
from tests.doubles.hub import Hub
from tests.support.content.memory_store import MemoryStore
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, source, with_secret
from tests.support.mirror.slabs import document, pack, publish

pytest_plugins = ("tests.support.mirror.fixtures",)
A, B, C, D = b"content a", b"content bb", b"content ccc", b"content dddd"


@dataclass
class Holdings:
    """A database with a store, filled as the mirror fills them."""

    database: Database
    store: MemoryStore = field(default_factory=MemoryStore)

    async def pack(self, scope: str, *files: bytes) -> Slab:
        """One slab of these files, recorded with the identities that led to them."""
        ((slab, packed, inside),) = pack(files, scope)
        self.store.put(slab.digest, bytearray(packed))
        async with self.database.write() as session:
            await contents.record_slabs(session, [slab])
            keys = {Identity.of(scope, one.digest.hex, slab.digest.hex).key: one for one in inside}
            await contents.record_contents(session, keys, 1.0)
        return slab

    async def keep_whole(self, content: bytes) -> None:
        layout = FileLayout.of(len(content), (digest_of(content),))
        self.store.put(layout.digest, bytearray(content))
        async with self.database.write() as session:
            keys = {Identity.of("public", "whole", layout.digest.hex).key: layout}
            await contents.record_contents(session, keys, 1.0)

    async def publish(self, organisation: str, *files: bytes) -> Manifest:
        assert await self.lost(organisation, *files) == []
        return manifest_of(files)

    async def lost(self, organisation: str, *files: bytes) -> list[Digest]:
        async with self.database.write() as session:
            return await publish(session, manifest_of(files), 1.0, organisation)

    async def mirrored(self, organisation: str, *files: bytes, status: str = "READY") -> Manifest:
        """Published by a mirror of the organisation, which is now in that state."""
        manifest = await self.publish(organisation, *files)
        name = f"mir_{organisation}_{manifest.digest.hex[:8]}"
        mirror = MirrorRow(
            id=name, organisation=organisation, request_key=name, status=status, created_at=1.0, started_at=1.0
        )
        mirrored = MirrorSourceRow(
            mirror_id=name,
            organisation=organisation,
            position=0,
            request={},
            source="hf://org/model",
            mount_location="/m",
            status=status,
            manifest=manifest.digest.hex,
            warnings=[],
        )
        async with self.database.write() as session:
            session.add(mirror)
            await session.flush()
            session.add(mirrored)
        return manifest

    async def unread(self, before: float = 2.0) -> dict[str, int]:
        async with self.database.read() as session:
            return await removal.unread_slabs(session, before, 2.0, is_rehearsal=False)

    async def damage(self, digest: Digest) -> None:
        """The disk has others under this name."""
        async with self.database.write() as session:
            assert await damaged.register(session, digest, 1.0, "its bytes are others")

    async def slabs(self, manifest: Manifest, organisation: str) -> dict[bytes, str | None]:
        """Slab by content, for what the layout lets an organisation read; each content is read back and checked."""
        async with self.database.read() as session:
            found = [one async for page in contents.layouts(session, manifest.digest.hex, organisation) for one in page]
        read: dict[bytes, str | None] = {}
        for one in found:
            with self.store.open(Digest(one.slab or one.digest)) as file:
                content = file.read()[one.offset : one.offset + one.size]
            assert digest_of(content).hex == one.digest
            read[content] = one.slab
        return read

    async def evict(self, *manifests: Manifest) -> tuple[list[int], set[str]]:
        """What each frees when it is given up, and the names of the objects that go when they are collected."""
        names = [manifest.digest.hex for manifest in manifests]
        async with removal.rehearsal(self.database) as rehearsal:
            await rehearsal.doom_dead(but=names)
            asked = [await rehearsal.freed(name, is_kept=True) for name in names[:1]]
            freed = [await rehearsal.freed(name, is_kept=False) for name in names]
            assert asked == freed[:1]
        async with self.database.write() as session:
            gone = set[bytes]()
            for name in names:
                leaving = removal.leaving_with(name, is_rehearsal=False)
                slabs = await removal.slabs_of(session, leaving)
                for find in (
                    partial(removal.in_slabs, slabs=slabs, dropped={}),
                    partial(removal.beside_slabs, after=""),
                ):
                    going = await find(session, leaving)
                    gone |= (await removal.objects_of(session, going)).chunks
                    await removal.forget(session, going)
                while await removal.forget_names(session, name):
                    pass
            unnamed = removal.Unnamed.among(StoredChunk(Digest.from_bytes(raw), 0, 0.0) for raw in gone)
            await removal.strike_named(session, unnamed, None)
            return freed, {raw.hex() for raw in unnamed.left}

    async def opens(self, manifest: Manifest, organisation: str, digest: Digest) -> bool:
        async with self.database.read() as session:
            known = digest.to_bytes() in await contents.objects(session, manifest.digest.hex, organisation)
            return known or bool(await contents.opened(session, [manifest.digest.hex], organisation, [digest.hex]))

    async def counts(self) -> tuple[int, int]:
        async with self.database.read() as session:
            queries = [select(func.count()).select_from(table) for table in (SlabScopeRow, SlabSliceRow)]
            scopes, slices = [(await session.execute(query)).scalar_one() for query in queries]
        return scopes, slices


def manifest_of(files: Sequence[bytes]) -> Manifest:
    return Manifest.of(FileEntry(f"{digest_of(one).hex}.bin", len(one), digest_of(one)) for one in files)


@pytest.fixture
async def held(database_url: str) -> AsyncIterator[Holdings]:
    database = Database(database_url)
    yield Holdings(database)
    await database.close()


async def test_a_slab_is_unread_when_its_organisations_read_nothing_of_it_and_have_no_mirror_at_work(
    held: Holdings,
) -> None:
    await held.pack("public", C, D)
    own, others = await held.pack("organisation:acme", A, B), await held.pack("organisation:rival", B, A, C)
    await held.mirrored("acme", A, B)
    assert await held.unread(before=1.0) == {}  # somebody may be about to name C
    assert await held.unread() == {others.digest.hex: others.size}
    working = await held.mirrored("rival", C, D, status="SYNCING")
    assert await held.unread() == {}
    async with held.database.write() as session:
        await mirrors.finish(session, f"mir_rival_{working.digest.hex[:8]}", "READY", now=2.0)
    assert await held.unread() == {}  # C lies in it, too
    async with held.database.write() as session:
        await mirrors.give_up(session, "rival", [working.digest.hex], "evi_1", 2.0)
    assert await held.unread() == {}  # it can be restored
    async with held.database.write() as session:
        assert await mirrors.begin_to_collect(session, working.digest.hex, 3.0, 3.0)
    assert await held.unread() == {others.digest.hex: others.size}
    await held.damage(own.digest)
    assert await held.unread() == {}  # it is all that is left of A and B
    async with held.database.write() as session:
        await session.execute(delete(DamagedChunkRow))
        await contents.drop_slabs(session, [others.digest.hex])
    assert (await held.counts(), await held.unread()) == ((2, 4), {})
    assert set((await held.slabs(await held.publish("acme", A, B), "acme")).values()) == {own.digest.hex}


async def test_packed_files_are_found_and_read_back_by_their_identities_and_by_their_manifest(held: Holdings) -> None:
    slab = await held.pack("public", A, B, C)
    manifest = await held.publish("acme", A, B, C)
    assert await held.slabs(manifest, "acme") == dict.fromkeys((A, B, C), slab.digest.hex)
    keys = [Identity.of("public", digest_of(one).hex, slab.digest.hex).key for one in (A, B, C)]
    async with held.database.read() as session:
        assert await contents.known(session, keys) == dict(zip(keys, map(digest_of, (A, B, C)), strict=True))
        second = await contents.layout_by_identity(session, Identity("public", keys[1]))
        assert second == FileLayout.packed(digest_of(B), len(B), slab, len(A))
        assert await contents.totals(session) == (3, len(A + B + C))
        found = await contents.a_slice(session, digest_of(C).hex)
    assert found is not None
    assert (found[0].slab, found[0].offset, found[1]) == (slab.digest, len(A + B), len(C))


async def test_an_identity_leads_into_slabs_of_its_own_scope_alone(held: Holdings) -> None:
    theirs = await held.pack("organisation:acme", A, B)
    own = await held.pack("organisation:rival", A, C)
    keys = [Identity.of(slab.scope, digest_of(A).hex, slab.digest.hex) for slab in (theirs, own)]
    async with held.database.read() as session:
        for identity, slab in zip(keys, (theirs, own), strict=True):
            found = await contents.layout_by_identity(session, identity)
            assert found == FileLayout.packed(digest_of(A), len(A), slab, 0)
        stranger = Identity("organisation:nobody", keys[0].key)
        assert await contents.layout_by_identity(session, stranger) is None


async def test_recording_the_same_again_changes_nothing(held: Holdings) -> None:
    for _ in range(2):
        await held.pack("public", A, B)
    assert await held.counts() == (1, 2)


async def test_each_organisation_reads_slabs_of_its_own_and_public_ones_alone(held: Holdings) -> None:
    acme = await held.pack("organisation:acme", A, B)
    assert await held.lost("rival", A) == [digest_of(A)]
    rival = await held.pack("organisation:rival", C, A)
    manifest = await held.publish("acme", A)
    assert await held.publish("rival", A) == manifest
    assert await held.slabs(manifest, "acme") == {A: acme.digest.hex}
    assert await held.slabs(manifest, "rival") == {A: rival.digest.hex}
    assert await held.slabs(manifest, "nobody") == {}
    assert await held.lost("nobody", A) == [digest_of(A)]  # although it is published for others
    public = await held.pack("public", D, A)
    assert await held.slabs(manifest, "nobody") == {A: public.digest.hex}
    readable = {"acme": [True, False, True], "rival": [False, True, True], "nobody": [False, False, True]}
    for organisation, expected in readable.items():
        slabs = (acme, rival, public)
        assert [await held.opens(manifest, organisation, slab.digest) for slab in slabs] == expected
        assert await held.opens(manifest, organisation, digest_of(A))
        assert not await held.opens(manifest, organisation, digest_of(B))


async def test_a_grant_opens_no_slab_but_those_that_hold_something_of_its_manifest(held: Holdings) -> None:
    await held.pack("organisation:acme", A, B)
    other = await held.pack("organisation:acme", C, D)
    manifest = await held.publish("acme", A, B)
    await held.publish("acme", C, D)
    for digest in (other.digest, digest_of(C)):
        assert not await held.opens(manifest, "acme", digest)


async def test_the_very_same_slab_of_two_organisations_is_readable_by_both_and_by_nobody_else(held: Holdings) -> None:
    slab = await held.pack("organisation:acme", A, B)
    assert (await held.pack("organisation:rival", A, B)).digest == slab.digest
    manifest = await held.publish("acme", A, B)
    await held.publish("rival", A, B)
    for organisation in ("acme", "rival"):
        assert set((await held.slabs(manifest, organisation)).values()) == {slab.digest.hex}
    assert await held.lost("nobody", A, B) != []
    assert await held.evict(manifest) == ([slab.size], {slab.digest.hex})
    assert await held.counts() == (0, 0)


async def test_a_file_lies_in_the_slab_that_serves_most_of_its_manifest(held: Holdings) -> None:
    one, two = await held.pack("public", A, D), await held.pack("public", B, A, C)
    both = {one.digest.hex, two.digest.hex}
    for files, expected in (((A, B, C), two), ((A, D), one)):  # for one of them it is the first by digest, too
        manifest = await held.publish("acme", *files)
        assert set((await held.slabs(manifest, "acme")).values()) == {expected.digest.hex}
    lonely = await held.publish("acme", A)
    assert await held.slabs(lonely, "acme") == {A: min(both)}


async def test_a_file_that_was_packed_and_then_came_whole_is_whole_for_everybody(held: Holdings) -> None:
    slab = await held.pack("organisation:acme", A, B)
    await held.keep_whole(A)
    manifest = await held.publish("rival", A)
    assert await held.slabs(manifest, "rival") == {A: None}
    assert not await held.opens(manifest, "rival", slab.digest)
    assert await held.evict(manifest) == ([len(A)], {digest_of(A).hex})  # B stays in the slab


async def test_a_file_that_was_whole_and_is_packed_stays_whole(held: Holdings) -> None:
    await held.keep_whole(A)
    await held.pack("public", A, B)
    assert await held.slabs(await held.publish("acme", A), "acme") == {A: None}


async def test_a_slab_goes_with_the_last_of_its_files_and_frees_its_bytes_once(held: Holdings) -> None:
    slab = await held.pack("public", A, B, C)
    one, two, both = await held.publish("acme", A, B), await held.publish("acme", C), await held.publish("acme", B, C)
    assert await held.evict(one) == ([0], set())
    assert await held.slabs(both, "acme") == dict.fromkeys((B, C), slab.digest.hex)
    assert await held.evict(two, both) == ([0, slab.size], {slab.digest.hex})
    assert await held.counts() == (0, 0)


@pytest.mark.promise("collection")
async def test_of_two_slabs_that_stand_in_for_each_other_one_goes_and_the_plan_says_so(held: Holdings) -> None:
    first = await held.pack("public", A, B)
    second = await held.pack("public", A, C)
    stays, one, two = [await held.publish("acme", content) for content in (A, B, C)]
    assert await held.evict(one, two) == ([first.size, 0], {first.digest.hex})
    assert await held.slabs(stays, "acme") == {A: second.digest.hex}


@pytest.mark.promise("collection")
@pytest.mark.parametrize("is_published", [True, False], ids=["published before", "half-written"])
async def test_who_had_written_names_that_a_collection_took_does_not_publish(
    held: Holdings, *, is_published: bool
) -> None:
    """A has written the names of a manifest; a collection begins with it; B mirrors it again, and only B's names are all there."""
    await held.pack("public", A, B)
    written = document(manifest_of([A, B]))
    names = [digest_of(one).hex for one in (A, B)]
    if is_published:
        await held.publish("acme", A, B)
    async with held.database.write() as session:
        first = await contents.draft(session, written, 2.0)
        assert (await contents.add_names(session, first, names, "rival"), first.is_published) == ([], is_published)
        begun = (
            await mirrors.begin_to_collect(session, first.manifest, 10.0, 10.0)
            if is_published
            else await mirrors.begin_to_collect_draft(session, first.manifest, 10.0, 10.0)
        )
        assert begun
        assert not await contents.publish(session, first, 11.0, "rival")
        second = await contents.draft(session, written, 12.0)
        assert not await mirrors.is_being_collected(session, first.manifest)
        assert not await contents.publish(session, first, 13.0, "rival")
        assert (await contents.add_names(session, second, names, "rival"), second.is_published) == ([], False)
        assert await contents.publish(session, second, 14.0, "rival")


ACME, RIVAL = "organisation:acme", "organisation:rival"


@pytest.mark.parametrize(("scopes", "reader", "damaged", "goes", "lies"), [
    pytest.param(("public", "public"), "acme", None, True, 1, id="elsewhere, too"),  # or a licence keeps all slabs
    pytest.param(("public", "public"), "acme", 1, False, 0, id="damaged elsewhere"),
    pytest.param(("public", "public"), "acme", 0, True, 1, id="damaged here"),
    pytest.param((ACME, RIVAL), "rival", None, False, 0, id="elsewhere for others"),  # who must find it where they read
    pytest.param((ACME, "public"), "acme", None, True, 1, id="elsewhere for all"),
])  # fmt: skip
async def test_a_slab_goes_when_all_that_stays_of_it_is_whole_elsewhere_for_its_readers(
    held: Holdings, scopes: tuple[str, str], reader: str, damaged: int | None, goes: bool, lies: int
) -> None:
    slabs = [await held.pack(scopes[0], A, B), await held.pack(scopes[1], A, C)]
    first, second = await held.publish("acme", A, B), await held.publish(reader, A, C)
    if damaged is not None:
        await held.damage(slabs[damaged].digest)

    def together(gone: Sequence[Slab]) -> tuple[list[int], set[str]]:
        return [sum(slab.size for slab in gone)], {slab.digest.hex for slab in gone}

    assert await held.evict(first) == together(slabs[:1] if goes else [])
    assert (await held.slabs(second, "acme"))[A] == slabs[lies].digest.hex
    assert await held.evict(second) == together(slabs[1:] if goes else slabs)


async def test_a_slab_stays_with_what_is_whole_by_itself_and_damaged(held: Holdings) -> None:
    await held.keep_whole(A)
    slab = await held.pack("public", A, B)
    first, second = await held.publish("acme", B), await held.publish("acme", A)
    await held.damage(digest_of(A))
    assert await held.evict(first) == ([0], set())
    async with held.database.read() as session:
        assert await contents.unreadable(session, second.digest.hex, "organisation:acme") == []
    assert await held.evict(second) == ([len(A) + slab.size], {digest_of(A).hex, slab.digest.hex})


async def test_a_slab_that_is_also_somebody_s_file_stays_with_it(held: Holdings) -> None:
    slab = await held.pack("public", A)  # a slab of one file has the file's name
    assert slab.digest == digest_of(A)
    large = FileLayout.of(CHUNK_SIZE + len(A), (digest_of(bytes(CHUNK_SIZE)), slab.digest))
    async with held.database.write() as session:
        await contents.record_contents(session, {"large": large}, 1.0)
    assert await held.evict(await held.publish("acme", A)) == ([len(A)], set())
    assert await held.counts() == (0, 0)


async def test_many_files_are_recorded_and_read_back(held: Holdings) -> None:
    files = [f"small file number {number}".encode() for number in range(3000)]
    slabs = list(pack(files, slab_size=6000))
    async with held.database.write() as session:
        await contents.record_slabs(session, [slab for slab, *_ in slabs])
        inside = {f"{one.digest.hex[::-1]}": one for *_, found in slabs for one in found}
        await contents.record_contents(session, inside, 1.0)
    for slab, packed, _ in slabs:
        held.store.put(slab.digest, bytearray(packed))
    manifest = await held.publish("acme", *files)
    assert len(await held.slabs(manifest, "acme")) == len(files)
    freed, doomed = await held.evict(manifest)
    assert (freed, len(doomed)) == ([sum(map(len, files))], len(slabs))


# --- Small files of a mirror rest in slabs, and nobody reads a neighbour's: neither by a layout nor by a chunk's name ---
TOKEN = "operator-token"
SHARED, SECRET, OTHER = b"the same bytes", b"acme's alone", b"rival's alone"


@pytest.fixture
async def guarded(upstreams: None, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with mirror_under_test(tmp_path / "mirror", serve=True, bearer=TOKEN, auth="token", token=TOKEN) as mirror:
        yield mirror


@pytest.fixture(params=["api", "data plane"])
async def reader(guarded: MirrorUnderTest, request: pytest.FixtureRequest) -> AsyncIterator[httpx2.AsyncClient]:
    """Chunks on either plane, without a token of its own."""
    if request.param == "api":
        client = httpx2.AsyncClient(transport=guarded.http._transport, base_url="http://mirror")
    else:
        client = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{guarded.service.data_port}", trust_env=False)
    async with client:
        yield client


async def mirrored(mirror: MirrorUnderTest, organisation: str, repository: str, **fields: Any) -> Digest:
    """The manifest of a private repository, mirrored for an organisation."""
    done = await mirror.ready_for(organisation, source(f"hf://{repository}", **with_secret("hub-token"), **fields))
    return Digest.parse(str(done.sources[0].manifest))


def bearer(mirror: MirrorUnderTest, organisation: str, manifest: Digest) -> dict[str, str]:
    mounts = (GrantedMount("/m", manifest, "hf://org/any"),)
    signer = GrantSigner((mirror.data_dir / "grant-key.pem").read_bytes())
    token = signer.sign(Grant(organisation, mounts, time.time() + 60))
    return {"Authorization": f"Bearer {token}"}


async def layouts_of(mirror: MirrorUnderTest, manifest: Digest, headers: dict[str, str]) -> dict[Digest, FileLayout]:
    answer = await mirror.http.get(f"/manifests/{manifest}/layout", headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(Layout.parse(answer.content).files)


async def read(reader: httpx2.AsyncClient, digest: Digest, headers: Json) -> tuple[int, bytes]:
    answer = await reader.get(f"/chunks/{digest}", headers=headers)
    return answer.status_code, answer.content if answer.status_code < 300 else b""


def sealed(organisation: str, files: bytes) -> bytes:
    return files + seal_of(f"organisation:{organisation}")


def slab_of(layout: FileLayout) -> Digest:
    assert layout.slice is not None
    return layout.slice.slab


async def test_small_files_are_read_from_one_slab_and_each_by_its_own_name(
    guarded: MirrorUnderTest, reader: httpx2.AsyncClient, hub: Hub
) -> None:
    files = {f"{number}.txt": f"file number {number}".encode() for number in range(20)}
    hub.repo("org/many", private=True).commit({**files, "empty.txt": b""})
    manifest = await mirrored(guarded, "acme", "org/many")
    headers = bearer(guarded, "acme", manifest)
    found = await layouts_of(guarded, manifest, headers)
    packed = [layout for layout in found.values() if layout.size]
    (slab,) = {slab_of(layout) for layout in packed}
    assert list(guarded.chunks().values()) == [sum(map(len, files.values())) + SEAL_SIZE]

    status, content = await read(reader, slab, headers)
    assert status == 200
    pieces = [content[one.slice.offset : one.slice.offset + one.size] for one in packed if one.slice]
    assert [digest_of(piece) for piece in pieces] == [one.digest for one in packed]
    for content in files.values():
        assert await read(reader, digest_of(content), headers) == (200, content)
    answer = await reader.get(f"/chunks/{digest_of(files['7.txt'])}", headers=headers | {"Range": "bytes=5-10"})
    assert (answer.status_code, answer.content) == (206, b"number")
    assert answer.headers["content-range"] == f"bytes 5-10/{len(files['7.txt'])}"


async def test_a_slab_is_never_read_through_another_organisation_s_grant(
    guarded: MirrorUnderTest, reader: httpx2.AsyncClient, hub: Hub
) -> None:
    """Both have the very same tree, and therefore one manifest; acme's file lies beside a secret one of acme's."""
    hub.repo("acme/model", private=True).commit({"a-secret.txt": SECRET, "shared.txt": SHARED})
    await mirrored(guarded, "acme", "acme/model")
    manifest = await mirrored(guarded, "acme", "acme/model", allow_patterns=["shared.txt"])
    hub.repo("rival/model", private=True).commit({"shared.txt": SHARED})
    assert await mirrored(guarded, "rival", "rival/model") == manifest
    acme, rival = (bearer(guarded, name, manifest) for name in ("acme", "rival"))
    shared = digest_of(SHARED)

    theirs = slab_of((await layouts_of(guarded, manifest, acme))[shared])
    own = slab_of((await layouts_of(guarded, manifest, rival))[shared])

    assert theirs != own
    assert await read(reader, theirs, acme) == (200, sealed("acme", SECRET + SHARED))
    assert await read(reader, theirs, rival) == (404, b"")
    assert await read(reader, digest_of(SECRET), rival) == (404, b"")
    assert await read(reader, own, rival) == (200, sealed("rival", SHARED))
    for headers in (acme, rival):
        assert await read(reader, shared, headers) == (200, SHARED)


async def test_who_may_not_read_a_slab_that_is_left_of_its_files_has_them_again(
    guarded: MirrorUnderTest, reader: httpx2.AsyncClient, hub: Hub
) -> None:
    """Its own slab was collected, and what is known of the files led there; acme has them, too, and keeps what it knows."""
    for organisation in ("acme", "rival"):
        hub.repo(f"{organisation}/model", private=True).commit({"a.txt": SHARED, "b.txt": OTHER})
    manifest = await mirrored(guarded, "acme", "acme/model")
    assert await mirrored(guarded, "rival", "rival/model") == manifest
    rival = bearer(guarded, "rival", manifest)
    slabs = {slab_of(layout).hex for layout in (await layouts_of(guarded, manifest, rival)).values()}
    async with guarded.service.requests.database.write() as session:
        await contents.drop_slabs(session, sorted(slabs))
    one = await mirrored(guarded, "rival", "rival/model", allow_patterns=["a.txt"])
    ((shared, layout),) = (await layouts_of(guarded, one, bearer(guarded, "rival", one))).items()
    assert await read(reader, slab_of(layout), bearer(guarded, "rival", one)) == (200, sealed("rival", SHARED))
    wanted = source("hf://acme/model", **with_secret("hub-token"), allow_patterns=["a.txt"])
    assert (await guarded.ready_for("acme", wanted)).bytes_transferred == 0
    assert shared == digest_of(SHARED)


async def test_a_slab_that_came_after_a_grant_was_used_is_read_with_it(
    guarded: MirrorUnderTest, reader: httpx2.AsyncClient, hub: Hub
) -> None:
    """The layout moves a file to the slab that serves most of the manifest, and that may be a newer one."""
    hub.repo("org/one", private=True).commit({"a.txt": SHARED})
    hub.repo("org/two", private=True).commit({"b.txt": OTHER})
    first, second = [await mirrored(guarded, "acme", f"org/{name}") for name in ("one", "two")]
    hub.repo("org/both", private=True).commit({"a.txt": SHARED, "b.txt": OTHER})
    for manifest in (first, second):
        headers = bearer(guarded, "acme", manifest)
        (layout,) = (await layouts_of(guarded, manifest, headers)).values()
        assert (await read(reader, slab_of(layout), headers))[0] == 200
    await mirrored(guarded, "acme", "org/both")
    both = sealed("acme", SHARED + OTHER)
    assert await read(reader, digest_of(both), bearer(guarded, "acme", first)) == (200, both)


async def test_one_request_packs_the_same_files_publicly_and_privately(guarded: MirrorUnderTest, hub: Hub) -> None:
    for name in ("open", "closed"):
        hub.repo(f"org/{name}", private=name == "closed").commit({"one.txt": SHARED, "two.txt": OTHER})
    wanted = [source("hf://org/open", "/a"), source("hf://org/closed", "/b", **with_secret("hub-token"))]
    await guarded.ready_for("acme", *wanted)
    assert {scope for _, scope in guarded.rows("slab_scopes")["slab_scopes"]} == {"public", ACME}
    assert (await guarded.ready_for("rival", wanted[0])).bytes_transferred == 0
