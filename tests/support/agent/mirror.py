"""A mirror for agents: real HTTP, real chunk server, real grants, content in memory, and faults that are scripted.

``is_packed`` makes it rest small files in slabs; a file of a slab is then served with its slab and not by itself.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO
from urllib.parse import parse_qs, parse_qsl, urlsplit

import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest, FileLayout, digest_of
from bdn.core.errors import BdnError, NotFoundError, UnauthenticatedError
from bdn.core.layout import Manifest
from bdn.core.manifest import SMALL_FILE_SIZE
from bdn.core.source.uri import parse_source
from bdn.net.chunk_server.served_chunks import ChunkRequest, OpenChunk
from bdn.net.chunk_server.server import ChunkServer
from bdn.wire.grants import Grant, GrantedMount, GrantSigner, GrantVerifier, new_signing_key
from bdn.wire.heartbeat_schema import Command, Heartbeat, HeartbeatReply, MemberDocument, Report
from bdn.wire.http_fields import DATA_PORT_HEADER, DELIVERY_HEADER
from bdn.wire.hub_schema import HubAnswer, HubContent, HubRequest
from bdn.wire.location_schema import Locations, LocationsRequest
from bdn.wire.mirror_schema import HubFile
from bdn.wire.operation_schema import EvictCommand, PrefetchCommand, VerifyCommand
from bdn.wire.shapes import Page, document_of, status_of
from node_agent.cache.records import Held
from tests.doubles.http_origin import Answer, Origin, Request
from tests.fakes.recorded_holdings import RecordedHoldings
from tests.support.agent.bucket import AgentBucket
from tests.support.content.layouts import held_of, pack, pieces, whole
from tests.support.content.memory_store import MemoryFile, MemoryStore, content_of

FORMS = ("whole", "packed")  # how small files rest: what holds for an agent holds for both
in_both_forms = pytest.mark.parametrize("mirror", FORMS, indirect=True)
Fault = Callable[[OpenChunk], OpenChunk]


# --- faults: what a request for a chunk may meet instead of the chunk ---


def flipped(chunk: OpenChunk) -> OpenChunk:
    """One bit is wrong."""
    content = bytearray(chunk.file.read())
    content[len(content) // 2] ^= 1
    return OpenChunk(MemoryFile(content), 0, chunk.size)


def truncated(chunk: OpenChunk) -> OpenChunk:
    """The connection ends half-way through the body."""
    return OpenChunk(MemoryFile(chunk.file.read()[: chunk.size // 2]), 0, chunk.size)


def missing(chunk: OpenChunk) -> OpenChunk:
    """The mirror has lost it."""
    raise NotFoundError("the chunk")


def failing(error: BdnError) -> Fault:
    """The mirror answers with an error."""

    def fault(_: OpenChunk) -> OpenChunk:
        raise error

    return fault


def held_by(gate: threading.Event, then: Fault | None = None) -> Fault:
    """The answer waits for a gate."""

    def fault(chunk: OpenChunk) -> OpenChunk:
        assert gate.wait(60), "the test never opened the gate"
        return then(chunk) if then else chunk

    return fault


# --- the mirror ---


@dataclass
class AgentMirror:
    """Everything an agent asks a mirror for. Since the last ``forget``, ``chunk_requests`` counts requests by chunk.

    ``documents`` counts those for roots and pages, by path; of those for pages the other figures, and ``every``, know nothing.
    """

    signer: GrantSigner = field(default_factory=lambda: GrantSigner(new_signing_key()))
    chunk_requests: Counter[Digest] = field(default_factory=Counter)
    documents: Counter[str] = field(default_factory=Counter)
    heartbeats: list[Heartbeat] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    faults: defaultdict[Digest, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    every: Fault | None = None  # met by each request that has no fault of its own
    on_request: Callable[[Digest], object] = lambda _: None
    url: str = ""
    is_packed: bool = False
    slab_size: int = CHUNK_SIZE
    down: bool = False  # every connection ends without an answer
    ring: dict[str, MemberDocument] | None = None  # members by node: whoever beats joins; None keeps all agents alone
    epoch: int = 1
    bucket: AgentBucket | None = None  # where its chunks are to be read; what ``publish`` stores is put there as well
    held: defaultdict[str, RecordedHoldings] = field(default_factory=lambda: defaultdict(RecordedHoldings))  # by node

    hub_answers: dict[str, HubAnswer] = field(default_factory=dict)  # by target; see ``offer``
    hub_beginnings: dict[str, bytes] = field(default_factory=dict)  # of files that are being copied, by target
    hub_requests: list[HubRequest] = field(default_factory=list)
    hub_failure: BdnError | None = None  # instead of an answer
    copied: threading.Event = field(default_factory=threading.Event)  # until then it says ``is_pending``, if it says so

    def __post_init__(self) -> None:
        self.store = MemoryStore()
        self.manifests: dict[Digest, Manifest] = {}
        self.trees: dict[Digest, Held] = {}
        self.hub_trees: dict[str, list[HubFile]] = {}  # listings of commits, by ``hf://org/model@<commit>``
        self.chunks_of: dict[Digest, set[Digest]] = {}  # of files: see ``pages_of``
        self.pages_of: dict[Digest, set[Digest]] = {}  # and its root
        self.suspected: list[Digest] = []  # chunks that were asked for as suspects
        self.data_port: int | None = None
        self.lock = threading.Lock()

    # --- what a test does ---

    def asked(self, condition: Callable[[Digest], bool] = lambda _: True) -> asyncio.Event:
        """Set once a chunk is asked for that fulfils the condition."""
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        self.on_request = lambda chunk: condition(chunk) and loop.call_soon_threadsafe(event.set)
        return event

    def publish(self, files: Mapping[str, bytes]) -> Manifest:
        """Mirror a tree."""
        layouts: dict[Digest, FileLayout] = {}
        small = [content for content in files.values() if self.is_packed and 0 < len(content) < SMALL_FILE_SIZE]
        for slab, packed, inside in pack(dict.fromkeys(small), slab_size=self.slab_size):
            self.store.put(slab, bytearray(packed))
            layouts.update((layout.digest, layout) for layout in inside)
        return self.publish_as(
            {path: layouts.get(digest_of(content)) or self._store(content) for path, content in files.items()}
        )

    def publish_as(self, files: Mapping[str, FileLayout]) -> Manifest:
        """A manifest of files whose chunks it has, or has not."""
        held = held_of(files)
        digest, pages = held.root.digest, dict(zip((page.digest for page in held.root.pages), held.pages, strict=True))
        pages[digest] = held.root.content
        for name, content in pages.items():
            self.store.put(name, bytearray(content))
        self.manifests[digest], self.trees[digest], self.pages_of[digest] = held.manifest, held, set(pages)
        self.chunks_of[digest] = {chunk for layout in files.values() for chunk in layout.fetched}
        if self.bucket is not None:
            for chunk in self.chunks_of[digest] | pages.keys():
                self.bucket.put(chunk, content_of(self.store, chunk))
        return held.manifest

    def grant(
        self,
        *manifests: Manifest,
        expires_in: float = 3600.0,
        organisation: str = "org",
        team: str | None = None,
        commits: Mapping[str, Manifest] | None = None,
    ) -> str:
        """A token for these manifests at /m0, /m1, …, or for ``commits`` of a hub: ``hf://org/model@main#<commit>``."""
        mounts = tuple(
            GrantedMount(f"/m{number}", manifest.digest, f"hf://org/model-{number}")
            for number, manifest in enumerate(manifests)
        ) + tuple(
            GrantedMount(f"/c{number}", manifest.digest, *name.split("#"))
            for number, (name, manifest) in enumerate((commits or {}).items())
        )
        return self.signer.sign(Grant(organisation, mounts, time.time() + expires_in, team))

    def chunks(self, manifest: Manifest, path: str) -> list[Digest]:
        """What an agent requests for one file, in order: its chunks, or the slab."""
        digest = next(entry.digest for entry in manifest.files if entry.path == path)
        return list(self.trees[manifest.digest].layout[digest].fetched)

    def hold(self, chunk: Digest | None = None, then: Fault | None = None) -> tuple[threading.Event, asyncio.Event]:
        """The answer about this chunk, or about each, waits for the first event; the second is set once it is asked for."""
        gate = threading.Event()
        if chunk is None:
            self.every = held_by(gate, then)
        else:
            self.faults[chunk] = [held_by(gate, then)]
        return gate, self.asked(lambda digest: chunk in (None, digest))

    def offer(self, target: str, manifest: Manifest, path: str, *, is_pending: bool = False) -> None:
        """Have the hub's clients find a file there. ``is_pending``: once ``copied`` is set."""
        size = next(entry.size for entry in manifest.files if entry.path == path)
        headers = {
            "etag": f'"{path}"',
            "x-repo-commit": "0" * 40,
            "accept-ranges": "bytes",
            "content-length": str(size),
        }
        content = HubContent(manifest=str(manifest.digest), path=path, size=size, grant=self.grant(manifest))
        self.hub_answers[target] = HubAnswer(
            headers={**headers, "content-type": "application/octet-stream"}, content=content, is_pending=is_pending
        )

    def ask(self, command: EvictCommand | PrefetchCommand | VerifyCommand) -> None:
        """Ask it of every agent, until one has answered."""
        kind = {EvictCommand: "evict", PrefetchCommand: "prefetch", VerifyCommand: "verify"}[type(command)]
        with self.lock:
            self.commands.append(Command.model_validate({"id": command.id, kind: command}))

    def reports(self, command_id: str | None = None) -> list[Report]:
        """What agents have reported of commands that were over, or of this one."""
        found = [report for beat in list(self.heartbeats) for report in beat.reports if not report.running]
        return [report for report in found if command_id in (None, report.id)]

    @property
    def requests(self) -> int:
        """Chunk requests since the last ``forget``."""
        return sum([*self.chunk_requests.values()])  # a copy: others count meanwhile

    def forget(self) -> None:
        """Start counting anew."""
        self.chunk_requests.clear()
        self.documents.clear()

    def renewed(self, *, is_packed: bool = False) -> AgentMirror:
        """As new, at the same address: for the next test of a module that shares one, because stopping takes a while."""
        fresh = AgentMirror(is_packed=is_packed)
        for name in vars(fresh).keys() - {"url", "data_port", "lock"}:
            setattr(self, name, getattr(fresh, name))
        return self

    @contextmanager
    def running(self) -> Iterator[AgentMirror]:
        """Answer on free loopback ports until the block ends."""
        with closing(ChunkServer(self, "127.0.0.1", 0)) as shelf, Origin("mirror", self._respond) as documents:
            self.data_port, self.url = shelf.port, documents.url
            shelf.start()
            yield self

    # --- what an agent asks ---

    def beat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        with self.lock:
            self.heartbeats.append(heartbeat)
            ended = {report.id for report in heartbeat.reports if not report.running}
            self.commands = [command for command in self.commands if command.id not in ended]
            commands = list(self.commands)
            epoch, members = self._join(heartbeat)
            digest = self.held[heartbeat.node].record(heartbeat.changes)
        return HeartbeatReply(
            members=members,
            epoch=epoch,
            pending=commands,
            public_keys=self.signer.public_keys,
            interval_seconds=0.2,
            holdings_digest=digest,
        )

    def _join(self, heartbeat: Heartbeat) -> tuple[int, list[MemberDocument]]:
        if self.ring is None:
            return 1, []
        member = MemberDocument(node=heartbeat.node, advertise=heartbeat.advertise, roles=heartbeat.roles)
        if self.ring.get(member.node) != member:
            self.ring[member.node] = member
            self.epoch += 1
        return self.epoch, list(self.ring.values())

    def _respond(self, request: Request) -> Answer:
        if self.down:
            raise ConnectionAbortedError
        try:
            if request.target == "/chunks/locations":
                content = self.locate(request).model_dump_json().encode()
            elif request.target.startswith("/trees?"):
                content = self.tree(request).model_dump_json().encode()
            elif request.target.endswith("/uses"):  # no project is in use
                content = b'{"items": []}'
            elif request.url.path == "/hub":
                content = self.answer_hub(request).model_dump_json().encode()
            elif request.method == "POST":
                content = self.beat(Heartbeat.model_validate_json(request.body)).model_dump_json().encode()
            else:
                return self.document(request)
        except BdnError as error:
            return Answer(status_of(error), content=json.dumps(document_of(error)).encode())
        return Answer(200, content=content)

    def answer_hub(self, request: Request) -> HubAnswer:
        if self.hub_failure is not None:
            raise self.hub_failure
        body = HubRequest.model_validate_json(request.body)
        self.hub_requests.append(body)
        answer = self.hub_answers.get(body.target, HubAnswer(status=404, headers={"x-error-code": "EntryNotFound"}))
        if body.method == "HEAD":
            return answer.model_copy(update={"content": None, "is_pending": False})
        if body.beginning_at is not None:
            start = body.beginning_at
            return answer.model_copy(update={"beginning": self.hub_beginnings.get(body.target, b"")[start:]})
        if answer.is_pending and self.copied.wait(float(parse_qs(request.url.query)["wait"][0])):
            return answer.model_copy(update={"is_pending": False})
        return answer

    def locate(self, request: Request) -> Locations:
        body, bearer = LocationsRequest.model_validate_json(request.body), request.headers["authorization"]
        digests = [Digest.parse(digest) for digest in body.digests]
        for digest in digests:
            self.authorize(ChunkRequest(digest, bearer.removeprefix("Bearer ")))
        assert self.bucket is not None, "an agent asks in vain"
        return self.bucket.locations(digests)

    def document(self, request: Request) -> Answer:
        """A root, and how its chunks are read."""
        _, kind, name = request.target.split("/")
        digest, bearer = Digest.parse(name), request.headers.get("authorization", "")
        if kind != "manifests" or digest not in self.trees or not self._verify(bearer[7:]).allows(digest):
            raise NotFoundError(request.target)
        self.documents[request.target] += 1
        headers = {"ETag": f'"{digest}"'}
        headers |= {} if self.data_port is None else {DATA_PORT_HEADER: str(self.data_port)}
        headers |= {DELIVERY_HEADER: "direct"} if self.bucket else {}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Answer(304, headers)
        return Answer(200, headers, self.trees[digest].root.content)

    def tree(self, request: Request) -> Page[HubFile]:
        """A file a page."""
        query = dict(parse_qsl(urlsplit(request.target).query))
        source, number = parse_source(query["source"]), int(query["cursor"])
        grant, files = self._verify(request.headers.get("authorization", "")[7:]), self.hub_trees.get(query["source"])
        if files is None or not grant.names(source):
            raise NotFoundError(query["source"])
        self.documents["/trees"] += 1
        is_last = number + 1 == len(files)
        return Page[HubFile](items=files[number : number + 1], next_cursor=None if is_last else str(number + 1))

    def authorize(self, request: ChunkRequest) -> str:
        if request.bearer is None:
            raise UnauthenticatedError
        grant = self._verify(request.bearer)
        named = (one for one, chunks in self.chunks_of.items() if request.digest in chunks | self.pages_of[one])
        if not any(map(grant.allows, named)):
            raise NotFoundError(f"chunk {request.digest}")
        return grant.organisation

    def open_chunk(self, request: ChunkRequest) -> OpenChunk:
        if self.down:
            raise ConnectionAbortedError
        digest = request.digest
        is_page = any(digest in pages for pages in self.pages_of.values())
        with self.lock:
            if is_page:
                self.documents[f"/chunks/{digest}"] += 1
            else:
                self.chunk_requests[digest] += 1
            if request.is_suspect:
                self.suspected.append(digest)
            script = self.faults[digest]
            fault = script.pop(0) if script else None if is_page else self.every
        if not is_page:
            self.on_request(digest)
        file: BinaryIO = self.store.open(digest)
        chunk = OpenChunk(file, 0, len(file.read()))
        file.seek(0)
        return fault(chunk) if fault else chunk

    def _verify(self, bearer: str) -> Grant:
        return GrantVerifier(self.signer.public_keys).verify(bearer, now=time.time())

    def _store(self, content: bytes) -> FileLayout:
        for piece in pieces(content):
            self.store.put(digest_of(piece), bytearray(piece))
        return whole(content)


@pytest.fixture
def fresh_mirror(server: AgentMirror, request: pytest.FixtureRequest) -> AgentMirror:
    """The server as new; small files rest packed, or as ``in_both_forms`` says.

    A module takes it as its ``mirror``: one of that name among the plugins' fixtures would be that of all modules.
    """
    return server.renewed(is_packed=getattr(request, "param", "packed") == "packed")
