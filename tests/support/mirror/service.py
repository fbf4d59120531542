"""A mirror in the test's own event loop, and what it wrote: rows, chunks, and the trees that can be read from it."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import copyfile
from typing import Any

import httpx2
from sqlalchemy import event

from bdn.core.chunk import digest_of
from bdn.core.errors import NotFoundError
from bdn.core.manifest import PageRef, PlacedFile, Root, files_of
from bdn.core.pace.retry import StallPolicy
from bdn.mirror.app import MirrorService, open_mirror
from bdn.mirror.db.database import Database
from bdn.mirror.settings import MirrorSettings
from bdn.mirror.upstream.budget import Pause
from bdn.wire.mirror_schema import Mirror, MirrorRequestBody
from tests.support import waiting
from tests.support.mirror.backends import KEPT, Behind, behind, grant_keys

Json = dict[str, Any]
LONGEST_SECONDS, until = waiting.LONGEST_SECONDS, waiting.until
_STALL = StallPolicy()
_COUNTED: ContextVar[list[str] | None] = ContextVar("statements", default=None)


def source(uri: str, mount: str = "/models/m", **fields: Any) -> Json:
    """One ``WeightsSource`` on the wire."""
    return {"source": uri, "mount_location": mount, **fields}


def with_secret(name: str) -> Json:
    return {"auth": {"auth_method": "CUSTOM_SECRET", "auth_secret_name": name}}


def refusal(answer: httpx2.Response) -> tuple[int, str]:
    """The status of an answer and the code of its error."""
    return answer.status_code, answer.json()["error"]["code"]


async def pause_not(_: float) -> None:
    """Instead of waiting before an upstream is asked again."""


@dataclass
class MirrorUnderTest:
    service: MirrorService
    http: httpx2.AsyncClient
    data_dir: Path

    @property
    def behind(self) -> Behind:
        """Its database and its store."""
        return behind(self.data_dir)

    async def post(self, *sources: Json, dry_run: bool = False) -> httpx2.Response:
        return await self.http.post("/mirror", json={"weights": sources}, params={"dry_run": dry_run})

    async def begin(self, *sources: Json) -> Json:
        """The mirror as the request answers it."""
        answer = await self.post(*sources)
        assert answer.status_code == 202, answer.text
        return dict(answer.json())

    async def ended(self, mirror_id: str) -> Json:
        answer = await self.http.get(f"/mirror/{mirror_id}", params={"wait": LONGEST_SECONDS})
        document: Json = answer.json()
        assert document["status"] in ("READY", "FAILED", "CANCELED"), document
        return document

    async def mirror(self, *sources: Json) -> Json:
        """The mirror in its terminal state."""
        return await self.ended((await self.begin(*sources))["id"])

    async def ready(self, *sources: Json) -> Json:
        document = await self.mirror(*sources)
        assert document["status"] == "READY", document["error"]
        return document

    async def ready_for(self, organisation: str, *sources: Json) -> Mirror:
        """A mirror of an organisation once it is READY, without a token of it."""
        requests = self.service.requests
        begun = await requests.request(MirrorRequestBody.model_validate({"weights": sources}).sources(), organisation)
        done = await requests.wait(begun.id, organisation, LONGEST_SECONDS)
        assert done.status == "READY", done.error
        return done

    async def manifest(self, *sources: Json) -> str:
        """Of the first source, once all are READY."""
        return str((await self.ready(*sources))["sources"][0]["manifest"])

    async def canceled(self, mirror_id: str) -> Json:
        answer = await self.http.post(f"/mirror/{mirror_id}/cancel")
        return dict(answer.json())

    async def released(self) -> None:
        """Come back when no worker is at work on any mirror, canceled ones included."""
        await until(lambda: not any(row[7] for row in self.rows("mirrors")["mirrors"]))

    async def get(self, path: str, **params: Any) -> Json:
        answer = await self.http.get(path, params=params)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def ask(self, operations: str, wait: float = 0, **request: Any) -> Json:
        """An operation as it is recorded; ``operations`` is such as ``evictions``."""
        answer = await self.http.post(f"/{operations}", params={"wait": wait}, json=request)
        assert answer.status_code == 202, answer.text
        return dict(answer.json())

    async def failed(self, *sources: Json) -> Json:
        """The error of a mirror that fails, after a look at what it left behind: nothing."""
        before = self.published()
        document = await self.mirror(*sources)
        assert document["status"] == "FAILED", document
        assert document["grant"] is None
        assert document["completed_at"] is not None
        assert {part["status"] for part in document["sources"]} <= {"FAILED", "READY"}
        assert self.published() == before
        return dict(document["error"])

    async def plan(self, *sources: Json) -> Json:
        answer = await self.post(*sources, dry_run=True)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def evict(self, **request: Any) -> Json:
        return await self.ask("evictions", LONGEST_SECONDS, **request)

    async def collect(self, **request: Any) -> Json:
        document = await self.ask("collections", LONGEST_SECONDS, **request)
        assert document["status"] == "DONE", document
        return document

    async def verify(self, organisation: str = "", **request: Any) -> Json:
        """A verification that has ended; of all that is held unless the request says what."""
        body = request if request.keys() & {"source", "manifest"} else {"all": True, **request}
        headers = {"BDN-Organisation": organisation} if organisation else {}
        params = {"wait": LONGEST_SECONDS}
        answer = await self.http.post("/verifications", params=params, json=body, headers=headers)
        assert answer.status_code == 202, answer.text
        document: Json = answer.json()
        assert document["status"] != "RUNNING", document
        return document

    async def metric(self, name: str) -> float:
        """One value without labels."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))

    async def pages(self, manifest: str, bearer: str | None = None) -> list[PageRef]:
        """The pages of a manifest, as its root lists them."""
        return list(Root.parse(await self._document(f"/manifests/{manifest}", manifest, bearer)).pages)

    async def files(self, manifest: str, bearer: str | None = None) -> dict[str, PlacedFile]:
        """The files of a manifest by path, as its pages have them."""
        names = [str(page.digest) for page in await self.pages(manifest, bearer)]
        pages = [await self._document(f"/chunks/{name}", name, bearer) for name in names]
        return {file.path: file for file in files_of(pages)}

    async def tree(self, manifest: str, bearer: str | None = None) -> dict[str, bytes]:
        """Every file of a manifest, each name on the way computed again."""
        tree: dict[str, bytes] = {}
        for path, file in (await self.files(manifest, bearer)).items():
            names = [str(name) for name in file.layout.fetched]
            content = b"".join([await self._document(f"/chunks/{name}", name, bearer) for name in names])
            if (place := file.layout.slice) is not None:
                content = content[place.offset : place.offset + file.size]
                assert digest_of(content) == file.digest
            assert len(content) == file.size
            tree[path] = content
        return tree

    async def _document(self, path: str, name: str, bearer: str | None) -> bytes:
        answer = await self.http.get(path, headers={"Authorization": f"Bearer {bearer}"} if bearer else {})
        if answer.status_code == 404:
            raise NotFoundError(path)
        assert answer.status_code == 200, answer.text
        assert str(digest_of(answer.content)) == name
        return answer.content

    def rows(self, *tables: str) -> dict[str, list[tuple[Any, ...]]]:
        """What the database holds; all tables when none is named."""
        return self.behind.rows(*tables)

    def count(self, table: str) -> int:
        return len(self.rows(table)[table])

    def damaged(self) -> int:
        """How many chunks are registered as damaged."""
        return len(self.behind.query("SELECT id FROM chunks WHERE damage IS NOT NULL"))

    def operations(self, kind: str) -> list[str]:
        """The ids of recorded operations of this kind."""
        return [row[0] for row in self.rows("operations")["operations"] if row[1] == kind]

    def published(self) -> dict[str, list[tuple[Any, ...]]]:
        return self.rows("manifests")

    def chunks(self) -> dict[str, int]:
        """Size by path of every chunk in the store."""
        return self.behind.chunks()


@contextmanager
def statements_of(mirror: MirrorUnderTest) -> Iterator[list[str]]:
    """What this task, and those that it begins meanwhile, send to the database; what others send is passed over."""
    seen: list[str] = []
    token = _COUNTED.set(seen)

    def note(_connection: Any, _cursor: Any, statement: str, *_: object) -> None:
        if _COUNTED.get() is seen:
            seen.append(statement)

    engine = mirror.service.requests.database._engine.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", note)
        _COUNTED.reset(token)


@asynccontextmanager
async def mirror_under_test(
    data_dir: Path,
    *,
    bearer: str | None = None,
    pause: Pause = pause_not,
    clock: Callable[[], float] = time.time,
    stall: StallPolicy = _STALL,
    serve: bool = False,
    work: bool = True,
    **settings: Any,
) -> AsyncIterator[MirrorUnderTest]:
    """A mirror that does not wait between attempts, with a data plane on a free port only where one is asked for."""
    found = behind(data_dir)
    settings = {**found.settings, **settings}
    if "database_url" not in settings:
        await asyncio.to_thread(prepare_database, data_dir)
    else:
        settings.setdefault("grant_key_file", grant_keys())
    settings.setdefault("outage_seconds", 0)  # six attempts
    opening = open_mirror(
        MirrorSettings(data_dir=data_dir, port=0, data_port=0, **settings),
        serve=serve,
        work=work,
        pause=pause,
        clock=clock,
        stall=stall,
    )
    with nullcontext() if clock is time.time else found.living_by(clock):
        async with opening as service:
            transport = httpx2.ASGITransport(app=service.api, raise_app_exceptions=False)
            headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://mirror", headers=headers, timeout=2 * LONGEST_SECONDS
            ) as http:
                yield MirrorUnderTest(service, http, data_dir)


def prepare_database(data_dir: Path) -> None:
    """An embedded database at the newest migration, unless there is one."""
    data_dir.mkdir(exist_ok=True)
    if not (data_dir / "mirror.sqlite").exists():
        copyfile(_migrated(), data_dir / "mirror.sqlite")


@asynccontextmanager
async def database_under_test(folder: Path) -> AsyncIterator[Database]:
    """An embedded database at the newest migration."""
    copyfile(await asyncio.to_thread(_migrated), folder / "mirror.sqlite")
    database = Database(f"sqlite+aiosqlite:///{folder}/mirror.sqlite")
    try:
        yield database
    finally:
        await database.close()


@cache
def _migrated() -> Path:
    """An empty database at the newest migration: making one takes a third of a second, copying it nothing."""
    path = Path(KEPT.name) / "empty.sqlite"

    async def make() -> None:
        database = Database(f"sqlite+aiosqlite:///{path}")
        await database.migrate()
        await database.close()

    asyncio.run(make())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path
