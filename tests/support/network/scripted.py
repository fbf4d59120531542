"""A service that answers what a test says, to try clients on."""

import json
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from fastapi.responses import Response

from bdn.core.errors import NotFoundError
from bdn.net.api_server import new_service


@dataclass
class Scripted:
    """A service that answers by path, in turn, and notes what it was asked."""

    answers: dict[str, list[Response]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""

    def app(self) -> FastAPI:
        app = new_service("scripted", limit_request_bytes=10**6)

        @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
        async def answer(path: str, request: Request) -> Response:
            what = f"{request.method} {request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
            self.asked.append((what, dict(request.headers), await request.body()))
            queue = self.answers.get(f"/{path}")
            if not queue:
                raise NotFoundError(f"path /{path}")
            return queue.pop(0)

        return app

    def say(self, path: str, content: object, status: int = 200) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.answers.setdefault(path, []).append(Response(body, status, media_type="application/json"))
