"""A shortage of descriptors is told once, and its end, or that of the server, not at all."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

import pytest
from fastapi import FastAPI

from bdn.net.api_server.http_server import log_shortages, serving
from tests.support.mirror.service import until


class _Short(socket.socket):
    """It takes no connection: the process has no descriptor for it."""

    def accept(self) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, "Too many open files")


async def test_a_server_that_ends_in_a_shortage_is_silent_about_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0.1)
    listener = _Short()
    listener.bind(("127.0.0.1", 0))
    async with serving(FastAPI(), listener):
        with socket.create_connection(listener.getsockname()):
            await until(lambda: caplog.records)
    await asyncio.sleep(0.2)  # until each place of the backlog has tried again
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "connections have to wait: Too many open files; see ulimit -n"
    ]


async def test_other_errors_of_callbacks_are_told_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    def wrong() -> None:
        raise ValueError("of somebody else")

    log_shortages()
    log_shortages()  # another server in this loop
    asyncio.get_running_loop().call_soon(wrong)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (record,) = caplog.records
    assert record.exc_info
    assert str(record.exc_info[1]) == "of somebody else"
