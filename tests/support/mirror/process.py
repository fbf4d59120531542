"""``bdn serve`` as a process of its own, to be killed."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import httpx2

from tests.support.mirror.backends import Behind, behind
from tests.support.mirror.service import LONGEST_SECONDS, Json
from tests.support.services.forked import Process, start

_LONGEST_START_SECONDS = 240  # on a machine with a hundred other things to do
_MAIN: Final = (sys.executable, "-c", "from bdn.cli.main import main; main()")
SERVE: Final = (*_MAIN, "serve", "--json")
WORK: Final = (*_MAIN, "worker")


@dataclass
class ServingProcess:
    """A mirror that serves. ``log`` is there once it has ended."""

    process: Process
    url: str
    http: httpx2.AsyncClient
    data_dir: Path
    data_port: int
    log: str = ""
    _out: asyncio.StreamReader = field(kw_only=True, repr=False)
    _reading: asyncio.Task[bytes] = field(kw_only=True, repr=False)

    @classmethod
    async def start(cls, data_dir: Path, *, command: Sequence[str] = SERVE, **environ: str) -> Self:
        options = () if "--port" in command else ("--port", "0", "--data-port", "0")
        process, out, err = await _start(command, data_dir, options, environ)
        reading = asyncio.create_task(err.read())
        try:
            said = json.loads(await asyncio.wait_for(_document(out), _LONGEST_START_SECONDS))
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            raise
        assert said, (await reading).decode()
        assert "url" in said, said
        url = said["url"]
        http = httpx2.AsyncClient(base_url=url, trust_env=False, timeout=2 * LONGEST_SECONDS)
        return cls(process, url, http, data_dir, said["data_port"], _out=out, _reading=reading)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end(signal.SIGKILL)

    async def end(self, number: signal.Signals) -> int:
        """Send the signal and wait; the exit status, negative when the signal itself ended it."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)
        status = await asyncio.wait_for(self.process.wait(), 30)
        self.log = (await self._reading).decode()
        await self._out.read()  # to its end, so that the loop has closed both pipes
        await self.http.aclose()
        return status

    async def begin(self, *sources: Json) -> str:
        answer = await self.http.post("/mirror", json={"weights": sources})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    async def ended(self, mirror_id: str) -> Json:
        document: Json = (await self.http.get(f"/mirror/{mirror_id}", params={"wait": LONGEST_SECONDS})).json()
        assert document["status"] not in ("PENDING", "SYNCING"), document
        return document

    @property
    def behind(self) -> Behind:
        """Its database and its store."""
        return behind(self.data_dir)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        return self.behind.query(statement)


@asynccontextmanager
async def working(data_dir: Path, command: Sequence[str] = WORK, **environ: str) -> AsyncIterator[Process]:
    """``bdn worker`` until the block ends; its log goes on beside the directory."""
    with data_dir.with_suffix(".log").open("ab") as log:
        environment = {**os.environ, "BDN_DATA_DIR": str(data_dir), **environ}
        process = await start(command, environment, log.fileno(), log.fileno())
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _document(out: asyncio.StreamReader) -> bytes:
    document = line = b""
    while line != b"}\n":
        line = await out.readline()
        if not line:
            return b"null"
        document += line
    return document


async def _start(
    command: Sequence[str], data_dir: Path, options: tuple[str, ...], environ: dict[str, str]
) -> tuple[Process, asyncio.StreamReader, asyncio.StreamReader]:
    environment = {**os.environ, **behind(data_dir).environment, "BDN_DATA_DIR": str(data_dir), **environ}
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    readers = await _reader(out), await _reader(err)
    try:
        return await start((*command, *options), environment, out_end, err_end), *readers
    finally:
        os.close(out_end)
        os.close(err_end)


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(descriptor, "rb", 0))
    return reader
