"""The doubles of all upstreams behind one face, so that one script of failures can be played on each of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count

from bdn.core.pace.retry import StallPolicy
from tests.doubles.faults import Fault, Script
from tests.doubles.gcs import GcsServer
from tests.doubles.hub import Hub
from tests.doubles.request_log import LoggedRequest, RequestLog
from tests.doubles.s3 import S3Server
from tests.support.content.noise import MIB, noise
from tests.support.mirror.service import Json, MirrorUnderTest, source, with_secret

_NUMBERS = count()
LARGE = "model.safetensors"
SMALL = "config.json"
CONTENT = noise(17 * MIB + 3, 1)
OTHER_CONTENT = bytes(len(CONTENT))
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


@dataclass(frozen=True)
class ScriptedUpstream:
    """One upstream with a source whose requests fail on command, and a neighbour at the same host whose do not."""

    wanted: Json
    neighbour: Json
    log: RequestLog
    script: Script
    listing: str  # what the requests for the source's listing look like
    bytes_of: Callable[[str], tuple[str, str | None]]  # likewise for the bytes of a file, and where they are asked for
    put: Callable[[Mapping[str, bytes]], object]

    def fail(self, fault: Fault, *, file: str = LARGE, skip: int = 0, times: int | None = 1) -> None:
        target, origin = self.bytes_of(file)
        self.script.add(fault, target, method="GET", origin=origin, skip=skip, times=times)

    def fail_listing(self, fault: Fault, *, times: int | None = 1) -> None:
        self.script.add(fault, self.listing, times=times)

    def reads(self, file: str = LARGE) -> list[LoggedRequest]:
        target, origin = self.bytes_of(file)
        return self.log.find(target, method="GET", origin=origin)

    def change(self) -> None:
        """Another version takes the place of the large file, of the same size."""
        self.put({LARGE: OTHER_CONTENT})


def scripted_hub(hub: Hub) -> ScriptedUpstream:
    """A repository; its large file lies at the CDN."""
    repository = hub.repo("org/model")
    repository.commit(FILES)
    hub.repo("org/neighbour").commit(NEIGHBOUR)

    def bytes_of(file: str) -> tuple[str, str]:
        return (f"/repos/.*{file}", "cdn") if file == LARGE else (f"/api/resolve-cache/.*{file}", "hub")

    wanted, neighbour = source("hf://org/model"), source("hf://org/neighbour", "/models/neighbour")
    return ScriptedUpstream(wanted, neighbour, hub.log, hub.script, "/org/model/tree/", bytes_of, repository.commit)


def scripted_hub_bucket(hub: Hub, *, sends_bytes: bool) -> ScriptedUpstream:
    """A folder of a bucket; its files lie at the CDN, or come from a mirror of the hub that sends them itself."""
    bucket = hub.bucket("org/bucket", private=True, sends_bytes=sends_bytes)
    hub.repo("org/neighbour").commit(NEIGHBOUR)

    def put(files: Mapping[str, bytes]) -> None:
        bucket.put({f"m/{path}": content for path, content in files.items()})

    def bytes_of(file: str) -> tuple[str, str]:
        return (f"/resolve/m%2F{file}", "hub") if sends_bytes else (f"/repos/.*{file}", "cdn")

    put(FILES)
    wanted = source("hf://buckets/org/bucket/m/", **with_secret("hub-token"))
    neighbour = source("hf://org/neighbour", "/models/neighbour")
    return ScriptedUpstream(wanted, neighbour, hub.log, hub.script, "/buckets/org/bucket/tree/", bytes_of, put)


def scripted_bucket(server: S3Server | GcsServer, scheme: str) -> ScriptedUpstream:
    """A folder of a bucket of S3, R2 or Google."""
    name, other = f"scripted-{next(_NUMBERS)}", f"neighbour-{next(_NUMBERS)}"
    bucket = server.bucket(name)

    def put(files: Mapping[str, bytes]) -> None:
        bucket.put({f"m/{path}": content for path, content in files.items()})

    put(FILES)
    server.bucket(other).put(NEIGHBOUR)
    is_google = scheme == "gs"
    secret = with_secret("gs-key" if is_google else "s3-keys")
    account = "4cc0." if scheme == "r2" else ""
    return ScriptedUpstream(
        source(f"{scheme}://{account}{name}/m/", **secret),
        source(f"{'gs' if is_google else 's3'}://{other}", "/models/neighbour", **secret),
        server.log,
        server.script,
        rf"/b/{name}/o\?" if is_google else f"/{name}[/?].*list-type=2",
        lambda file: (f"/b/{name}/o/m%2F{file}" if is_google else f"/{name}/m/{file}", None),
        put,
    )


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
