"""The public gcp-storage-emulator on a free port, in memory: a GCS that nobody here wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPConnection
from typing import Self

from gcp_storage_emulator.server import create_server


class GcsEmulator:
    """Runs from ``with`` until its end."""

    def __init__(self) -> None:
        self._server = create_server("127.0.0.1", 0, in_memory=True)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    @property
    def _port(self) -> int:
        return int(self._server._api._httpd.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def bucket(self, name: str) -> EmulatedBucket:
        """A new, empty bucket; the emulator asks nobody who they are."""
        self._post("/storage/v1/b?project=double", b'{"name": "%s"}' % name.encode(), "application/json")
        return EmulatedBucket(self, name)

    def upload(self, bucket: str, name: str, content: bytes) -> None:
        """In two parts, because the emulator fails on an empty object in one."""
        description = f"--parts\r\nContent-Type: application/json\r\n\r\n{json.dumps({'name': name})}\r\n"
        body = b"%s--parts\r\nContent-Type: application/octet-stream\r\n\r\n%s\r\n--parts--"
        target = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart"
        self._post(target, body % (description.encode(), content), "multipart/related; boundary=parts")

    def _post(self, target: str, body: bytes, kind: str) -> None:
        with closing(HTTPConnection("127.0.0.1", self._port)) as connection:
            connection.request("POST", target, body, {"Content-Type": kind})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, (answer.status, target)


class EmulatedBucket:
    def __init__(self, emulator: GcsEmulator, name: str) -> None:
        self._emulator = emulator
        self.name = name

    def put(self, objects: Mapping[str, bytes]) -> None:
        for name, content in objects.items():
            self._emulator.upload(self.name, name, content)
