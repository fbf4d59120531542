"""A private registry of container images, from which podman pulls: the read side of the OCI distribution specification."""

import base64
import json
from pathlib import Path

from tests.doubles.http_origin import Answer, Origin, Request


class Registry(Origin):
    """Serves the one image of ``layout``, an OCI image layout, under any name, to callers with this login."""

    def __init__(self, layout: Path, username: str, password: str) -> None:
        super().__init__("registry", self._respond)
        self._layout = layout
        self._login = f"Basic {base64.b64encode(f'{username}:{password}'.encode()).decode()}"

    @property
    def address(self) -> str:
        """As image names begin."""
        return self.url.removeprefix("http://")

    def _respond(self, request: Request) -> Answer:
        if request.headers.get("authorization") != self._login:
            return _refusal(401, "UNAUTHORIZED", {"WWW-Authenticate": 'Basic realm="registry"'})
        *_, kind, name = request.url.path.split("/")
        if request.url.path == "/v2/":
            return Answer(200, content=b"{}")
        if kind == "manifests" and ":" not in name:
            (manifest,) = json.loads((self._layout / "index.json").read_bytes())["manifests"]
            return self._blob(manifest["digest"], manifest["mediaType"])
        if kind in ("manifests", "blobs"):
            return self._blob(name, "application/octet-stream")
        return _refusal(404, "NAME_UNKNOWN", {})

    def _blob(self, digest: str, media_type: str) -> Answer:
        path = self._layout / "blobs" / digest.replace(":", "/", 1)
        if not path.is_file():
            return _refusal(404, "BLOB_UNKNOWN", {})
        headers = {"Content-Type": media_type, "Docker-Content-Digest": digest}
        return Answer(200, headers, path.read_bytes())


def _refusal(status: int, code: str, headers: dict[str, str]) -> Answer:
    errors = json.dumps({"errors": [{"code": code, "message": code.lower()}]}).encode()
    return Answer(status, {"Content-Type": "application/json", **headers}, errors)
