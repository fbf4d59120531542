"""What a pusher sends to a mirror's data port, and what it does not."""

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.core.errors import StoreUnavailableError
from bdn.core.manifest import slab_cutter
from bdn.net.api_clients import MirrorClient
from bdn.net.chunk_server.served_chunks import PushedChunk
from bdn.net.http1.pool import ConnectionPool
from bdn.net.tls import Authorities, Certificate
from bdn.transfer.byte_threads import ByteThreads
from bdn.wire.push_schema import ChunkList, Push, PushedFile, PushRequest
from bdn.wire.shapes import moment
from node_agent.job.pushing import Pusher, SentFile
from node_agent.job.tree import ChangedError, JobDirectory
from tests.support.content.shelves import Inbox, Shelf, serving
from tests.support.network.authority import new_authority
from tests.support.services.commands import wait_until

CONTENTS = {"a": os.urandom(2_000_000), "b": os.urandom(3_000_001)}
NAMES = {path: digest_of(content) for path, content in CONTENTS.items()}
ALL = [
    PushedFile(path=path, size=len(content), chunks=[str(NAMES[path])]) for path, content in sorted(CONTENTS.items())
]
TOLD = {(path, 0): digest for path, digest in NAMES.items()}
SOURCE = "bt://p@job/x"


@dataclass
class Mirror:
    """The part of a client that begins a push, and asks what ``inbox`` lacks. ``failures`` of its answers are that it cannot say."""

    inbox: Inbox
    failures: int = 0
    named: Callable[[], object] = lambda: None  # called when chunks were named, and none is sent yet
    asked: list[set[str]] = field(default_factory=list)
    data_port: int = 0
    base_url: str = ""
    bearer: str | None = None

    async def begin_push(self, request: PushRequest) -> Push:
        assert request.source == SOURCE
        return Push(push_id=f"mir_{'0a' * 12}", expires_at=moment(0), data_port=self.data_port)

    async def missing(self, push_id: str, chunks: ChunkList) -> ChunkList:
        assert push_id == f"mir_{'0a' * 12}"
        self.named()
        await asyncio.sleep(0)  # as who asks a network does
        self.asked.append(set(chunks.chunks))
        if len(self.asked) <= self.failures:
            raise StoreUnavailableError("the database is away")
        held = {one.digest for one in self.inbox.store.listed()}
        return ChunkList(chunks=[one for one in chunks.chunks if Digest.parse(one) not in held])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path, content in CONTENTS.items():
        (tmp_path / path).write_bytes(content)
    return tmp_path


def write_chunks(path: Path, count: int) -> None:
    """A file of so many chunks, each unlike the others."""
    with path.open("wb") as file:
        for number in range(count):
            file.seek(number * CHUNK_SIZE)
            file.write(bytes([number]))
        file.truncate(count * CHUNK_SIZE)


class Counting(Inbox):
    """Counts chunks that are large and many, and keeps none."""

    def take(self, request: PushedChunk, content: memoryview) -> None:
        self.taken.append(b"")


@dataclass
class Sent:
    """What was pushed, and what the journal is told: the names of chunks by path and index."""

    files: list[PushedFile]
    told: dict[tuple[str, int], Digest]


async def send(
    mirror: Mirror,
    folder: Path,
    certificate: Certificate | None = None,
    trusted: Path | None = None,
    known: Mapping[str, Digest] | None = None,
) -> Sent:
    """Push the folder; ``known`` are first chunks that need not be read."""
    told: dict[tuple[str, int], Digest] = {}

    def on_known(path: str, index: int, digest: Digest) -> None:
        told[path, index] = digest

    directory = JobDirectory(folder, 1000)
    known = known or {}
    files = [
        SentFile(
            path,
            stamp.size,
            partial(directory.opened, path, stamp),
            {0: known[path]} if path in known else {},
            partial(on_known, path),
        )
        for path, stamp in sorted(directory.look().files.items())
    ]
    with (
        serving(Shelf(mirror.inbox.store), received=mirror.inbox, certificate=certificate) as server,
        closing(ByteThreads(2, "naming")) as namers,
        closing(ByteThreads(4, "push")) as senders,
        closing(ConnectionPool(timeout_seconds=60, authorities=Authorities(trusted))) as pool,
    ):
        mirror.data_port = server.port
        mirror.base_url = f"{'https' if certificate else 'http'}://localhost:{server.port}"
        pusher = Pusher(cast("MirrorClient", mirror), pool, namers, senders)
        _, pushed = await pusher.send(SOURCE, files)
    return Sent(pushed, told)


async def test_what_the_mirror_holds_is_not_sent(folder: Path) -> None:
    mirror = Mirror(Inbox())
    mirror.inbox.store.put(NAMES["a"], memoryview(CONTENTS["a"]))
    sent = await send(mirror, folder)
    assert mirror.inbox.taken == [CONTENTS["b"]]
    assert sent == Sent(ALL, TOLD)


def slabs_of(tree: Mapping[str, bytes]) -> list[bytes]:
    """What is sent of small files."""
    cutter = slab_cutter()
    pieces = [piece for path in sorted(tree) for piece in cutter.add(path, path, len(tree[path]))]
    return [b"".join(tree[path] for path in piece) for piece in [*pieces, *cutter.finish()]]


async def test_small_files_are_sent_as_slabs_beside_what_is_large(tmp_path: Path) -> None:
    tree = {f"{number:02}": os.urandom(900_000) for number in range(20)} | {"15 large": os.urandom(3_000_001), "x": b""}
    for path, content in tree.items():
        (tmp_path / path).write_bytes(content)
    small = {path: content for path, content in tree.items() if path not in {"15 large", "x"}}
    mirror = Mirror(Inbox())

    sent = await send(mirror, tmp_path)

    slabs = slabs_of(small)
    assert len(slabs) > 1
    assert sorted(mirror.inbox.taken) == sorted([*slabs, tree["15 large"]])
    assert list(sent.told) == [("15 large", 0)]
    assert [file.path for file in sent.files] == sorted(tree)
    by_name = {str(digest_of(slab)): slab for slab in slabs}
    for file in sent.files:
        if file.path in small:
            lies = by_name[str(file.slab)][file.offset : (file.offset or 0) + file.size]
            assert (lies, file.digest, file.chunks) == (tree[file.path], str(digest_of(lies)), [])
        else:
            assert (file.slab, len(file.chunks)) == (None, 1 if file.size else 0)


async def test_a_slab_that_the_mirror_holds_is_not_sent(tmp_path: Path) -> None:
    for path, content in {"a": b"1", "b": b"23"}.items():
        (tmp_path / path).write_bytes(content)
    mirror, slab = Mirror(Inbox()), digest_of(b"123")
    mirror.inbox.store.put(slab, memoryview(b"123"))
    sent = await send(mirror, tmp_path)
    assert mirror.inbox.taken == []
    assert [(file.slab, file.offset) for file in sent.files] == [(str(slab), 0), (str(slab), 1)]


async def test_the_mirror_is_asked_once_which_of_many_chunks_it_lacks(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}").write_bytes(os.urandom(1_100_000))
    mirror = Mirror(Inbox())
    await send(mirror, tmp_path)
    assert len(mirror.inbox.taken) == 10
    assert len(mirror.asked) == 1


async def test_sending_begins_when_a_few_chunks_are_named(tmp_path: Path) -> None:
    write_chunks(tmp_path / "large", 9)
    mirror = Mirror(Counting())
    sent = await send(mirror, tmp_path)
    assert len(mirror.asked[0]) == 4
    assert set.union(*mirror.asked) == {chunk for file in sent.files for chunk in file.chunks}
    assert len(mirror.inbox.taken) == len(sent.told) == 9


async def test_chunks_are_named_while_every_sender_waits_for_the_mirror(tmp_path: Path) -> None:
    """Else nothing is sent while the next ones are named."""
    write_chunks(tmp_path / "large", 17)

    class Waiting(Counting):
        def take(self, request: PushedChunk, content: memoryview) -> None:
            wait_until(lambda: sum(map(len, mirror.asked)) == 17)
            super().take(request, content)

    mirror = Mirror(Waiting())
    sent = await send(mirror, tmp_path)
    assert len(mirror.inbox.taken) == len(sent.told) == 17


async def test_equal_chunks_are_sent_once(tmp_path: Path) -> None:
    for path in "abcdefgh":
        (tmp_path / path).write_bytes(bytes(2_000_000))
    mirror = Mirror(Inbox())
    sent = await send(mirror, tmp_path)
    assert mirror.inbox.taken == [bytes(2_000_000)]
    assert sent.told == {(path, 0): digest_of(bytes(2_000_000)) for path in "abcdefgh"}


async def test_what_is_known_is_not_read_where_the_mirror_holds_it_and_is_named_again_where_not(folder: Path) -> None:
    """A journal may be wrong: what is written within one tick of the file system's clock does not show in a file's times."""
    mirror, wrong = Mirror(Inbox()), os.urandom(2_000_000)
    sent = await send(mirror, folder, known={"a": digest_of(wrong), "b": NAMES["b"]})
    assert sent == Sent(ALL, {("a", 0): NAMES["a"]})
    (folder / "b").write_bytes(bytes(3_000_001))
    mirror.inbox.store.put(digest_of(wrong), memoryview(wrong))
    sent = await send(mirror, folder, known={"a": digest_of(wrong), "b": NAMES["b"]})
    assert [file.chunks for file in sent.files] == [[str(digest_of(wrong))], [str(NAMES["b"])]]
    assert sent.told == {}
    assert sorted(mirror.inbox.taken) == sorted(CONTENTS.values())


async def test_a_mirror_that_cannot_say_what_it_holds_is_asked_again_and_sent_nothing(folder: Path) -> None:
    mirror = Mirror(Inbox(), failures=2)
    sent = await send(mirror, folder)
    assert sent == Sent(ALL, TOLD)
    assert len(mirror.asked) > 2
    assert sorted(mirror.inbox.taken) == sorted(CONTENTS.values())


async def test_each_try_asks_first_whether_the_one_before_came_through(folder: Path) -> None:
    """The chunk was taken, and the answer is lost: it is not sent again."""

    class Failing(Inbox):
        def take(self, request: PushedChunk, content: memoryview) -> None:
            super().take(request, content)
            if len(self.taken) == 1:
                raise StoreUnavailableError("the database is away")

    mirror = Mirror(Failing())
    assert await send(mirror, folder) == Sent(ALL, TOLD)
    assert sorted(mirror.inbox.taken) == sorted(CONTENTS.values())


async def test_over_tls_a_file_is_sent_as_it_is(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    authority = new_authority(tmp_path_factory.mktemp("authority"), "unused")
    certificate = Certificate("BDN_TLS", *authority.issue(tmp_path_factory.mktemp("shown"), "localhost"))
    mirror = Mirror(Inbox())
    assert await send(mirror, folder, certificate, authority.certificates) == Sent(ALL, TOLD)
    assert sorted(mirror.inbox.taken) == sorted(CONTENTS.values())


@pytest.mark.parametrize("size", [1000, 2_000_000], ids=["in a slab", "large"])
@pytest.mark.parametrize("content", [b"another", b"", None], ids=["shorter", "empty", "other"])
async def test_what_is_written_after_it_was_named_is_told_and_never_kept(
    tmp_path: Path, content: bytes | None, size: int
) -> None:
    (tmp_path / "a").write_bytes(os.urandom(size))
    changed = os.urandom(size) if content is None else content
    mirror = Mirror(Inbox(), named=lambda: (tmp_path / "a").write_bytes(changed))
    with pytest.raises(ChangedError):
        await send(mirror, tmp_path)
    assert mirror.inbox.taken == []
