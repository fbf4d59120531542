"""Azure Blob Storage: a double of its listings and blobs, and the real server azurite.

    with AzureServer() as server:
        server.container("weights").put({"a.txt": b"x"})

The double is as strict with signatures as Azure ("Create a service SAS"); it knows the permissions ``r`` and ``l`` of a
container's token.
"""

import hmac
import os
import re
import subprocess
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from hashlib import md5
from http.client import HTTPConnection
from pathlib import Path
from typing import Final, Protocol, Self
from urllib.parse import parse_qsl, quote, unquote, urlencode
from xml.sax.saxutils import escape

from tests.doubles.http_origin import Answer, Origin, Request
from tests.support.network.ports import free_port

ACCOUNT: Final = "bdnaccount"
KEY: Final = b64encode(b"a key of an account, for tests alone").decode()
VERSION: Final = "2021-12-02"
_AZURITE: Final = Path(__file__).parents[2] / ".azurite"  # from make azurite
_START_SECONDS: Final = 120
_UNSPEAKABLE: Final = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML


def _signed(text: str) -> str:
    return b64encode(hmac.digest(b64decode(KEY), text.encode(), "sha256")).decode()


def container_sas(container: str, permissions: str, ends: str = "2099-01-01T00:00:00Z") -> str:
    """A service SAS."""
    fields = (permissions, "", ends, f"/blob/{ACCOUNT}/{container}", "", "", "", VERSION, "c", *[""] * 7)
    query = {"sv": VERSION, "sr": "c", "sp": permissions, "se": ends}
    return urlencode(query | {"sig": _signed("\n".join(fields))})


class Container(Protocol):
    @property
    def name(self) -> str: ...

    def put(self, objects: Mapping[str, bytes]) -> None: ...


class AzureLike(Protocol):
    """``url`` is for ``UpstreamSettings.azure_endpoint_url``."""

    url: str

    def container(self, name: str, *, public: bool = False) -> Container: ...


@dataclass
class HeldContainer:
    name: str
    public: bool
    blobs: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)  # of a hierarchical namespace
    writes: int = 0

    def put(self, objects: Mapping[str, bytes]) -> None:
        for name, content in objects.items():
            self.writes += 1
            self.blobs[name] = content, f'"0x8D{self.writes:013X}"'


def refused(status: int, code: str, headers: Mapping[str, str] | None = None) -> Answer:
    body = f"\ufeff<?xml version='1.0'?><Error><Code>{code}</Code><Message>double</Message></Error>"
    return Answer(status, {"x-ms-error-code": code, **(headers or {})}, body.encode())


class AzureServer(Origin):
    """The double, with one account."""

    def __init__(self) -> None:
        super().__init__("azure", self._respond)
        self.url += "/{account}"
        self.page_limit = 1000
        self._containers: dict[str, HeldContainer] = {}

    def container(self, name: str, *, public: bool = False) -> HeldContainer:
        """A new, empty one."""
        found = self._containers[name] = HeldContainer(name, public)
        return found

    def _respond(self, request: Request) -> Answer:
        _, account, name, *rest = request.url.path.split("/", 3)
        query = dict(parse_qsl(request.url.query, keep_blank_values=True))
        found = self._containers.get(name)
        assert account == ACCOUNT
        needed = "r" if rest else "l"
        if "sig" not in query:
            if found is None or not found.public:
                return refused(404, "ResourceNotFound")
        elif query["sig"] != dict(parse_qsl(container_sas(name, query["sp"], query["se"])))["sig"] or query[
            "se"
        ] < time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.now())):
            return refused(403, "AuthenticationFailed")
        elif needed not in query["sp"]:
            return refused(403, "AuthorizationPermissionMismatch")
        if found is None:
            return refused(404, "ContainerNotFound")
        return self._blob(found, unquote(rest[0]), request) if rest else self._list(found, query)

    def _blob(self, container: HeldContainer, name: str, request: Request) -> Answer:
        held = container.blobs.get(name)
        if held is None:
            return refused(404, "BlobNotFound")
        content, etag = held
        if request.headers.get("if-match", etag) != etag:
            return refused(412, "ConditionNotMet")
        return Answer(200, {"ETag": etag}, content, ranged=True)

    def _list(self, container: HeldContainer, query: Mapping[str, str]) -> Answer:
        limit = min(int(query["maxresults"]), self.page_limit)
        every = sorted({*container.blobs, *container.directories})
        names = [name for name in every if name.startswith(query.get("prefix", "")) and name >= query.get("marker", "")]
        blobs = "".join(self._entry(container, name) for name in names[:limit])
        following = escape(names[limit]) if len(names) > limit else ""
        text = f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker>{following}</NextMarker></EnumerationResults>"
        document = f"\ufeff<?xml version='1.0' encoding='utf-8'?>{text}"
        return Answer(200, {"Content-Type": "application/xml"}, document.encode())

    def _entry(self, container: HeldContainer, name: str) -> str:
        content, etag = container.blobs.get(name, (b"", '"0x1"'))
        encoded = f'<Name Encoded="true">{quote(name)}</Name>'
        named = encoded if _UNSPEAKABLE.search(name) else f"<Name>{escape(name)}</Name>"
        digest = b64encode(md5(content, usedforsecurity=False).digest()).decode()
        kind = "<ResourceType>directory</ResourceType>" if name in container.directories else ""
        facts = f"<Etag>{etag.strip(chr(34))}</Etag><Content-Length>{len(content)}</Content-Length><Content-MD5>{digest}</Content-MD5>{kind}"
        return f"<Blob>{named}<Properties>{facts}</Properties></Blob>"


@dataclass(frozen=True)
class RealContainer:
    """Filled by requests that an account SAS signs."""

    name: str
    server: "AzuriteServer"

    def put(self, objects: Mapping[str, bytes]) -> None:
        for name, content in objects.items():
            self.server.send(f"{self.name}/{quote(name)}?", content, {"x-ms-blob-type": "BlockBlob"})


class AzuriteServer:
    """On a free port of the loopback and in memory, from ``with`` until its end."""

    is_installed: Final = (_AZURITE / ".ready").exists()

    def __init__(self) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}/{{account}}"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        command = (
            "node",
            str(_AZURITE / "node_modules/azurite/dist/src/blob/main.js"),
            "--blobHost",
            "127.0.0.1",
            "--blobPort",
            str(self._port),
        )
        options = ("--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry")
        environment = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
        with self._stack:
            process = subprocess.Popen([*command, *options], env=environment, stdout=subprocess.DEVNULL)
            self._stack.callback(process.wait)
            self._stack.callback(process.kill)
            deadline = time.monotonic() + _START_SECONDS
            while not self._answers():
                if time.monotonic() > deadline or process.poll() is not None:
                    raise TimeoutError("azurite did not start")
                time.sleep(0.1)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def container(self, name: str, *, public: bool = False) -> RealContainer:
        """A new, empty one."""
        self.send(f"{name}?restype=container&", b"", {"x-ms-blob-public-access": "container"} if public else {})
        return RealContainer(name, self)

    def send(self, target: str, body: bytes, headers: Mapping[str, str]) -> None:
        """A PUT; ``target`` ends where its signature begins."""
        query = {"sv": VERSION, "ss": "b", "srt": "sco", "sp": "rwdlac", "se": "2099-01-01T00:00:00Z"}
        fields = (ACCOUNT, query["sp"], query["ss"], query["srt"], "", query["se"], "", "", VERSION, "", "")
        signed = urlencode(query | {"sig": _signed("\n".join(fields))})
        with closing(HTTPConnection("127.0.0.1", self._port)) as connection:
            connection.request("PUT", f"/{ACCOUNT}/{target}{signed}", body, {"x-ms-version": VERSION, **headers})
            answer = connection.getresponse()
            assert answer.status == 201, (answer.status, answer.read())

    def _answers(self) -> bool:
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=5)) as connection:
            try:
                connection.request("GET", "/")
                connection.getresponse().read()
            except OSError:
                return False
        return True
