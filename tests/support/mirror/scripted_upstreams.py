"""The doubles of all upstreams behind one face, so that one script of failures can be played on each of them."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import count

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.pace.retry import StallPolicy
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import Fault, Script
from tests.doubles.gcs import GcsServer
from tests.doubles.hub import Hub
from tests.doubles.request_log import LoggedRequest, RequestLog
from tests.doubles.s3 import S3Server
from tests.support.mirror.service import Json, MirrorUnderTest, source, with_secret

_NUMBERS = count()
_SIZE = 2 * CHUNK_SIZE + 12_345
LARGE = "model.safetensors"
SMALL = "config.json"
CONTENT = GeneratedContent(_SIZE, seed=3).read(0, _SIZE)
OTHER_CONTENT = GeneratedContent(_SIZE, seed=4).read(0, _SIZE)
FILES: Mapping[str, bytes] = {LARGE: CONTENT, SMALL: b'{"small": 1}', "vocabulary.txt": b"a\nb\n" * 5000}
NEIGHBOUR: Mapping[str, bytes] = {"a.txt": b"the neighbour's", "b/c.bin": bytes(range(256)) * 40}

# Of the mirror that is put to the test.
TRANSFERS = 4
STALL = StallPolicy(least_bytes=64 * 1024, window_seconds=0.3)


class Pauses:
    """Lets every pause pass at once, and notes how long it should have been."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


class ScriptedUpstream(ABC):
    """One upstream with a source whose requests fail on command, and a neighbour at the same host whose do not."""

    wanted: Json
    neighbour: Json
    listing: str  # what the requests for the source's listing look like
    log: RequestLog
    script: Script

    @abstractmethod
    def fail(self, fault: Fault, *, file: str = LARGE, skip: int = 0, times: int | None = 1) -> None:
        """Let requests for the bytes of a file fail."""

    def fail_listing(self, fault: Fault, *, times: int | None = 1) -> None:
        """Let pages of the source's listing fail."""
        self.script.add(fault, self.listing, times=times)

    @abstractmethod
    def reads(self, file: str = LARGE) -> list[LoggedRequest]:
        """The requests for the bytes of a file so far."""

    @abstractmethod
    def change(self) -> None:
        """Another version takes the place of the large file, of the same size."""


class ScriptedHub(ScriptedUpstream):
    """A repository; its large file lies at the CDN."""

    listing = "/org/model/tree/"

    def __init__(self, hub: Hub) -> None:
        self.hub, self.log, self.script = hub, hub.log, hub.script
        self._repository = hub.repo("org/model")
        self._repository.commit(FILES)
        hub.repo("org/neighbour").commit(NEIGHBOUR)
        self.wanted, self.neighbour = source("hf://org/model"), source("hf://org/neighbour", "/models/neighbour")

    def fail(self, fault: Fault, *, file: str = LARGE, skip: int = 0, times: int | None = 1) -> None:
        target, origin = self._bytes_of(file)
        self.script.add(fault, target, method="GET", origin=origin, skip=skip, times=times)

    def reads(self, file: str = LARGE) -> list[LoggedRequest]:
        target, origin = self._bytes_of(file)
        return self.log.find(target, method="GET", origin=origin)

    def change(self) -> None:
        self._repository.commit({LARGE: OTHER_CONTENT})

    @staticmethod
    def _bytes_of(file: str) -> tuple[str, str]:
        return (f"/repos/.*{file}", "cdn") if file == LARGE else (f"/api/resolve-cache/.*{file}", "hub")


class _ScriptedBucket(ScriptedUpstream):
    bytes_: str

    def fail(self, fault: Fault, *, file: str = LARGE, skip: int = 0, times: int | None = 1) -> None:
        self.script.add(fault, self.bytes_.format(file), method="GET", skip=skip, times=times)

    def reads(self, file: str = LARGE) -> list[LoggedRequest]:
        return self.log.find(self.bytes_.format(file), method="GET")


class ScriptedS3(_ScriptedBucket):
    """A folder of a bucket."""

    def __init__(self, server: S3Server) -> None:
        self.log, self.script = server.log, server.script
        name, other = f"scripted-{next(_NUMBERS)}", f"neighbour-{next(_NUMBERS)}"
        self._bucket = server.bucket(name)
        self._bucket.put({f"m/{path}": content for path, content in FILES.items()})
        server.bucket(other).put(NEIGHBOUR)
        self.listing, self.bytes_ = f"/{name}[/?].*list-type=2", f"/{name}/m/{{}}"
        self.wanted = source(f"s3://{name}/m/", **with_secret("s3-keys"))
        self.neighbour = source(f"s3://{other}", "/models/neighbour", **with_secret("s3-keys"))

    def change(self) -> None:
        self._bucket.put({f"m/{LARGE}": OTHER_CONTENT})


class ScriptedR2(ScriptedS3):
    """The same at R2."""

    def __init__(self, server: S3Server) -> None:
        super().__init__(server)
        self.wanted["source"] = self.wanted["source"].replace("s3://", "r2://4cc0.")


class ScriptedGcs(_ScriptedBucket):
    """A folder of a bucket."""

    def __init__(self, server: GcsServer) -> None:
        self.log, self.script = server.log, server.script
        self._bucket = server.bucket("scripted")
        self._bucket.put({f"m/{path}": content for path, content in FILES.items()})
        server.bucket("neighbour").put(NEIGHBOUR)
        self.listing, self.bytes_ = r"/b/scripted/o\?", "/b/scripted/o/m%2F{}"
        self.wanted = source("gs://scripted/m/", **with_secret("gs-key"))
        self.neighbour = source("gs://neighbour", "/models/neighbour", **with_secret("gs-key"))
        self.secret = json.dumps(server.account.short_key())

    def change(self) -> None:
        self._bucket.put({f"m/{LARGE}": OTHER_CONTENT})


async def check(mirror: MirrorUnderTest, document: Json, expected: str | Mapping[str, bytes]) -> None:
    """The source ended with this error, or with these files; its neighbour is whole, and there is no other manifest.

    To be asked of a mirror in which the two sources were never READY before, or were so with the same files.
    """
    scripted, neighbour = document["sources"]
    assert neighbour["status"] == "READY", neighbour["error"]
    assert await mirror.tree(neighbour["manifest"]) == NEIGHBOUR
    published = {manifest for (manifest, *_) in mirror.rows("manifests")["manifests"]}
    known = {neighbour["manifest"].removeprefix("b3:")}
    if isinstance(expected, str):
        assert (scripted["status"], document["status"]) == ("FAILED", "FAILED")
        assert scripted["error"]["code"] == expected, scripted["error"]
        assert scripted["manifest"] is document["grant"] is None
    else:
        assert scripted["status"] == document["status"] == "READY", scripted["error"]
        assert await mirror.tree(scripted["manifest"]) == expected
        known.add(scripted["manifest"].removeprefix("b3:"))
    assert published == known
