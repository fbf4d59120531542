"""What is behind the mirrors that tests start: SQLite and a directory or, as in production, PostgreSQL and a bucket.

A test whose fixtures include ``backend`` is of a mirror on either. It runs on the embedded one; in ``make fault`` on production as well,
and in ``make test`` if it is marked ``production``. One that is about SQLite or the directory of chunks is marked ``embedded(why)``, and
skipped on production. ``BDN_TEST_BACKEND`` names the only one that is wanted. On production a test's id says so. ``BDN_TEST_S3`` names
a server of the S3 protocol that runs already, ``http://KEY:SECRET@HOST:PORT``, to be used for all buckets.
"""

import asyncio
import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final, TypeVar
from urllib.parse import urlsplit

import pytest

from bdn.core.chunk import Digest
from bdn.mirror.db.clock import DatabaseClock
from bdn.mirror.db.database import Database
from bdn.store.bucket_store import BucketStore
from bdn.store.directory import DirectoryStore
from bdn.wire.grants import new_signing_key
from tests.contract.opening import keys_of
from tests.doubles.object_server import ObjectServer
from tests.doubles.seaweed import RealS3, SeaweedServer
from tests.doubles.sigv4 import Account
from tests.support.mirror.postgres import drop_database, fetch, new_database, postgres
from tests.support.promises.tally import FULL

EMBEDDED: Final = "embedded"
PRODUCTION: Final = "production"
BUCKET: Final = "mirrors"  # of all of them: each has a prefix of its own
ONLY: Final = os.environ.get("BDN_TEST_BACKEND")
_S3: Final = "BDN_TEST_S3"
_Result = TypeVar("_Result")
Row = tuple[Any, ...]


# --- which tests run on which ---


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "production: runs on PostgreSQL and a bucket in `make test`, too")
    config.addinivalue_line("markers", "embedded(why): is about SQLite or the directory of chunks")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", _backends(metafunc.definition), indirect=True, scope="module")


def _backends(test: pytest.Item) -> list[Any]:
    """The parameters. The embedded one does not show in a test's id, so that this is what it would be without another."""
    why = test.get_closest_marker(EMBEDDED)
    skipped = [pytest.mark.skip(f"on {PRODUCTION}: {why.args[0]}")] if why else []
    found = {
        EMBEDDED: pytest.param(EMBEDDED, id=pytest.HIDDEN_PARAM),
        PRODUCTION: pytest.param(PRODUCTION, marks=[getattr(pytest.mark, PRODUCTION), *skipped]),
    }
    is_both = FULL or test.get_closest_marker(PRODUCTION)
    return [found[name] for name in ([ONLY] if ONLY else found if is_both else [EMBEDDED])]


# --- what a test sees and damages of it ---
KEPT: Final = TemporaryDirectory(prefix="bdn-test-")


@cache
def grant_keys() -> Path:
    """The keys of all mirrors of these tests that share a database with others."""
    return write_keys(Path(KEPT.name) / "grant-keys.pem", new_signing_key())


def write_keys(path: Path, *keys: bytes) -> Path:
    """A file of private keys, for its owner alone."""
    path.touch(0o600)
    path.write_bytes(b"".join(keys))
    return path


class Behind(ABC):
    """The database and the store of the mirror of one data directory."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What the mirror is told of them."""

    store_type: ClassVar[type[Any]]

    @property
    @abstractmethod
    def database_url(self) -> str: ...

    @property
    @abstractmethod
    def grant_keys(self) -> Path: ...

    @property
    def environment(self) -> dict[str, str]:
        """The same for a process."""
        return {f"BDN_{name.upper()}": str(value) for name, value in self.settings.items()}

    @abstractmethod
    def living_by(self, clock: Callable[[], float]) -> AbstractContextManager[None]:
        """Until the block ends, the clocks of the database and of the store are this one."""

    @abstractmethod
    def query(self, statement: str, *values: object) -> list[Row]:
        """Any statement, committed; ``?`` is where a value goes."""

    @abstractmethod
    def tables(self) -> list[str]: ...

    def rows(self, *tables: str) -> dict[str, list[Row]]:
        """What the database holds; all tables when none is named."""
        return {name: sorted(self.query(f"SELECT * FROM {name}"), key=repr) for name in tables or self.tables()}

    @abstractmethod
    def chunks(self) -> dict[str, int]:
        """Size by path of every chunk in the store."""

    @abstractmethod
    def chunk(self, digest: Digest) -> AbstractContextManager[Path]:
        """A chunk as a file. What stands there when the block ends is what the store has."""

    @abstractmethod
    def evidence(self) -> list[str]:
        """The names of wrong chunks that are kept for people."""


@dataclass(frozen=True)
class Embedded(Behind):
    store_type = DirectoryStore
    data_dir: Path

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    @property
    def database_url(self) -> str:
        return f"sqlite+aiosqlite:///{self.data_dir}/mirror.sqlite"

    @property
    def grant_keys(self) -> Path:
        return self.data_dir / "grant-key.pem"

    def living_by(self, clock: Callable[[], float]) -> AbstractContextManager[None]:
        return nullcontext()  # both ask the mirror's

    def query(self, statement: str, *values: object) -> list[Row]:
        with closing(sqlite3.connect(self.data_dir / "mirror.sqlite", timeout=30)) as connection, connection:
            return list(connection.execute(statement, values))

    def tables(self) -> list[str]:
        return [name for (name,) in self.query("SELECT name FROM sqlite_master WHERE type='table'")]

    def chunks(self) -> dict[str, int]:
        root = self.data_dir / "store/chunks"
        return {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()}

    @contextmanager
    def chunk(self, digest: Digest) -> Iterator[Path]:
        path = self.data_dir / "store/chunks" / digest.fanout
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path

    def evidence(self) -> list[str]:
        return sorted(path.name for path in (self.data_dir / "store/quarantine").glob("*"))


@dataclass(frozen=True)
class Production(Behind):
    """``server`` is a real one, or our double."""

    store_type = BucketStore
    server: RealS3 | ObjectServer
    postgres: str
    name: str  # of the database, and of the folder of the bucket

    @property
    def database_url(self) -> str:
        return f"{self.postgres}/{self.name}"

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "database_url": self.database_url,
            "store": f"s3://{BUCKET}/{self.name}",
            "store_endpoint": self.server.url,
            "store_secret": "backend-keys",
            "grant_key_file": self.grant_keys,
        }

    @property
    def grant_keys(self) -> Path:
        return grant_keys()

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"BDN_INFRASTRUCTURE_SECRET_BACKEND_KEYS": keys_of(self.server.account)}

    @contextmanager
    def living_by(self, clock: Callable[[], float]) -> Iterator[None]:
        """PostgreSQL is not asked for its time; of the servers of a bucket, only our double takes a clock."""
        if not isinstance(self.server, ObjectServer):
            pytest.skip(f"{_S3} is set, and this test sets the server's clock")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(DatabaseClock, "set", lambda *_: None)
            patched.setattr(self.server, "clock", clock)
            patched.setattr(self.server, "signatures_clock", clock)
            yield

    def query(self, statement: str, *values: object) -> list[Row]:
        numbers = count(1)
        numbered = "".join(f"${next(numbers)}" if sign == "?" else sign for sign in statement)
        return [tuple(row.values()) for row in _done(fetch(self.database_url, numbered, *values))]

    def tables(self) -> list[str]:
        return [name for (name,) in self.query("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")]

    def chunks(self) -> dict[str, int]:
        root = f"{self.name}/b3/"
        return {key.removeprefix(root): size for key, size in self.server.sizes(BUCKET, root).items()}

    @contextmanager
    def chunk(self, digest: Digest) -> Iterator[Path]:
        key = f"{self.name}/b3/{digest.fanout}"
        with TemporaryDirectory() as folder:
            path = Path(folder) / digest.hex
            before = self.server.read(BUCKET, key)
            if before is not None:
                path.write_bytes(before)
            yield path
            after = path.read_bytes() if path.exists() else None
            if after != before:  # what is written again is another object
                self.server.overwrite(BUCKET, key, after)

    def evidence(self) -> list[str]:
        root = f"{self.name}/quarantine/"
        return [key.removeprefix(root) for key in sorted(self.server.sizes(BUCKET, root))]


def _done(work: Coroutine[Any, Any, _Result]) -> _Result:
    """On a loop of its own, because a test may be in one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


# --- the servers, and which backend a mirror that is started now has ---


@dataclass
class _Servers:
    """Each data directory gets a database and a prefix, when a mirror is first started in it."""

    postgres: str
    template: str
    bucket: RealS3 | ObjectServer
    made: dict[Path, Production] = field(default_factory=dict)

    def behind(self, data_dir: Path) -> Production:
        if data_dir not in self.made:
            server, _, name = _done(new_database(self.postgres, self.template)).rpartition("/")
            self.made[data_dir] = Production(self.bucket, server, name)
        return self.made[data_dir]

    def close(self) -> None:
        for one in self.made.values():
            _done(drop_database(self.postgres, one.database_url))


_behind: Callable[[Path], Behind] = Embedded


def behind(data_dir: Path) -> Behind:
    """What a mirror in this directory has that is started in this test."""
    return _behind(data_dir)


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of every mirror that a test of this module starts; its name. A mirror for several tests is a fixture that asks for this one."""
    if request.param == EMBEDDED:
        yield EMBEDDED
        return
    names = ("postgres_server", "postgres_template", "bucket_server")
    servers = _Servers(*map(request.getfixturevalue, names))
    with pytest.MonkeyPatch.context() as patched, closing(servers):
        patched.setattr(f"{__name__}._behind", servers.behind)
        patched.setenv("BDN_INFRASTRUCTURE_SECRET_BACKEND_KEYS", keys_of(servers.bucket.account))
        yield PRODUCTION


@pytest.fixture(scope="session")
def bucket_server(request: pytest.FixtureRequest) -> Iterator[RealS3 | ObjectServer]:
    """A double, for mirrors in this process, whose clocks tests set; ``tests/e2e`` has a real one."""
    with nullcontext(request.getfixturevalue("seaweed")) if _S3 in os.environ else ObjectServer() as server:
        server.bucket(BUCKET)
        yield server


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealS3]:
    """SeaweedFS, or the server that ``BDN_TEST_S3`` names."""
    if named := urlsplit(os.environ.get(_S3, "")).netloc:
        keys, _, address = named.rpartition("@")
        yield RealS3(f"http://{address}", Account(*keys.split(":", 1)))
        return
    with SeaweedServer(tmp_path_factory.mktemp("seaweed") / "server") as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture(scope="session")
def postgres_template(postgres_server: str) -> str:
    """The name of a database at the newest migration: making one takes a second, copying it a tenth."""

    async def make() -> str:
        url = await new_database(postgres_server)
        database = Database(url)
        await database.migrate()
        await database.close()
        return url.rpartition("/")[2]

    return _done(make())
