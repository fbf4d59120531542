"""What a pusher sends to a mirror's data port, and what it does not."""

import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from bdn.core.chunk import Digest, digest_of
from bdn.core.errors import StoreUnavailableError
from bdn.net.api_clients import MirrorClient
from bdn.net.http1.pool import ConnectionPool
from bdn.net.tls import Authorities, Certificate
from bdn.transfer.byte_threads import ByteThreads
from bdn.wire.push_schema import Push, PushRequest
from bdn.wire.shapes import moment
from node_agent.job.pushing import Pusher, SentFile
from node_agent.job.tree import ChangedError, JobDirectory
from tests.support.content.shelves import Inbox, Shelf, serving
from tests.support.network.authority import new_authority

CONTENTS = {"a": os.urandom(1000), "b": os.urandom(3_000_001)}


class Mirror:
    """The part of a client that begins a push."""

    def __init__(self, data_port: int) -> None:
        self._data_port = data_port

    async def begin_push(self, request: PushRequest) -> Push:
        assert request.source == "bt://p@job/x"
        return Push(push_id=f"mir_{'0a' * 12}", expires_at=moment(0), data_port=self._data_port)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path, content in CONTENTS.items():
        (tmp_path / path).write_bytes(content)
    return tmp_path


async def send(inbox: Inbox, folder: Path, certificate: Certificate | None = None, trusted: Path | None = None) -> None:
    def on_known(path: str, index: int, digest: Digest) -> None:
        assert (index, digest) == (0, digest_of(CONTENTS[path]))

    directory = JobDirectory(folder, 100)
    files = [
        SentFile(path, len(CONTENTS[path]), partial(directory.opened, path, stamp), {}, partial(on_known, path))
        for path, stamp in sorted(directory.look().files.items())
    ]
    with (
        serving(Shelf(inbox.store), received=inbox, certificate=certificate) as server,
        closing(ByteThreads(1, "push")) as threads,
        closing(ConnectionPool(timeout_seconds=60, authorities=Authorities(trusted))) as pool,
    ):
        scheme = "https" if certificate else "http"
        pusher = Pusher(cast("MirrorClient", Mirror(server.port)), f"{scheme}://localhost:{server.port}", pool, threads)
        _, chunks = await pusher.send("bt://p@job/x", files)
    assert chunks == {(path, 0): digest_of(content) for path, content in CONTENTS.items()}


async def test_what_the_mirror_holds_is_not_sent(folder: Path) -> None:
    inbox = Inbox()
    inbox.store.put(digest_of(CONTENTS["a"]), memoryview(CONTENTS["a"]))
    await send(inbox, folder)
    assert inbox.taken == [CONTENTS["b"]]


async def test_a_mirror_that_cannot_say_what_it_holds_is_asked_again_and_sent_nothing(folder: Path) -> None:
    class Busy(Inbox):
        left = 2

        def holds(self, request: Any) -> Any:
            self.left -= 1
            self.refusal = StoreUnavailableError("the database is away") if self.left >= 0 else None
            found = super().holds(request)
            self.refusal = None
            return found

    inbox = Busy()
    await send(inbox, folder)
    assert inbox.taken == list(CONTENTS.values())
    assert [request.size for request in inbox.requests] == [0, 0, 0, 1000, 0, 3_000_001]


async def test_over_tls_a_file_is_sent_as_it_is(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    authority = new_authority(tmp_path_factory.mktemp("authority"), "unused")
    certificate = Certificate("BDN_TLS", *authority.issue(tmp_path_factory.mktemp("shown"), "localhost"))
    inbox = Inbox()
    await send(inbox, folder, certificate, authority.certificates)
    assert inbox.taken == list(CONTENTS.values())


@pytest.mark.parametrize("content", [b"another", b"", CONTENTS["a"][::-1]], ids=["shorter", "empty", "other"])
async def test_what_is_written_after_it_was_named_is_told_and_never_kept(folder: Path, content: bytes) -> None:
    class Writing(Inbox):
        def holds(self, request: Any) -> Any:
            (folder / "a").write_bytes(content)
            return super().holds(request)

    inbox = Writing()
    with pytest.raises(ChangedError):
        await send(inbox, folder)
    assert inbox.taken == []
