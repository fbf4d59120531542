"""What a pusher sends to a mirror's data port, and what it does not."""

import os
from contextlib import closing
from typing import Any, cast

from bdn.core.chunk import ByteRange, Digest, digest_of
from bdn.core.errors import StoreUnavailableError
from bdn.net.api_clients import MirrorClient
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.byte_threads import ByteThreads
from bdn.wire.push_schema import Push, PushRequest
from bdn.wire.shapes import moment
from node_agent.job.pushing import Pusher, SentFile
from tests.support.content.shelves import Inbox, Shelf, serving

CONTENTS = {"a": os.urandom(1000), "b": os.urandom(2000)}


class Mirror:
    """The part of a client that begins a push."""

    def __init__(self, data_port: int) -> None:
        self._data_port = data_port

    async def begin_push(self, request: PushRequest) -> Push:
        assert request.source == "bt://p@job/x"
        return Push(push_id=f"mir_{'0a' * 12}", expires_at=moment(0), data_port=self._data_port)


def sent(path: str) -> SentFile:
    def read(part: ByteRange, buffer: memoryview) -> None:
        buffer[:] = CONTENTS[path][part.start : part.stop]

    def on_known(index: int, digest: Digest) -> None:
        assert (index, digest) == (0, digest_of(CONTENTS[path]))

    return SentFile(path, len(CONTENTS[path]), read, {}, on_known)


async def send(inbox: Inbox) -> None:
    with (
        serving(Shelf(inbox.store), received=inbox) as server,
        closing(ByteThreads(1, "push")) as threads,
        closing(ConnectionPool(timeout_seconds=60)) as pool,
    ):
        mirror = cast("MirrorClient", Mirror(server.port))
        pusher = Pusher(mirror, f"http://127.0.0.1:{server.port}", pool, threads)
        _, chunks = await pusher.send("bt://p@job/x", [sent(path) for path in CONTENTS])
    assert chunks == {(path, 0): digest_of(content) for path, content in CONTENTS.items()}


async def test_what_the_mirror_holds_is_not_sent() -> None:
    inbox = Inbox()
    inbox.store.put(digest_of(CONTENTS["a"]), memoryview(CONTENTS["a"]))
    await send(inbox)
    assert inbox.taken == [CONTENTS["b"]]


async def test_a_mirror_that_cannot_say_what_it_holds_is_asked_again_and_sent_nothing() -> None:
    class Busy(Inbox):
        left = 2

        def holds(self, request: Any) -> Any:
            self.left -= 1
            self.refusal = StoreUnavailableError("the database is away") if self.left >= 0 else None
            found = super().holds(request)
            self.refusal = None
            return found

    inbox = Busy()
    await send(inbox)
    assert inbox.taken == list(CONTENTS.values())
    assert [request.size for request in inbox.requests] == [0, 0, 0, 1000, 0, 2000]
