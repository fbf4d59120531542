"""A collector of OpenTelemetry: receives OTLP over HTTP, decoded with the protocol's own package."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Received:
    """A span, with the attributes of its process; ids are hexadecimal."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    process: dict[str, Any]
    status: int
    seconds: float
    began: int
    ended: int


@dataclass
class Collector:
    """``text`` is everything that arrived, as text, for a search for secrets."""

    url: str = ""
    spans: list[Received] = field(default_factory=list)
    text: str = ""
    paths: list[str] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator["Collector"]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector._take(self.path, body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_address[1]}"
            thread = Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()

    def _take(self, path: str, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.text += str(request)
        self.paths.append(path)
        for resource in request.resource_spans:
            process = _values(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [_received(span, process) for span in scope.spans]

    def named(self, name: str) -> list[Received]:
        return [span for span in list(self.spans) if span.name == name]

    def children(self, parent: Received) -> list[Received]:
        """In the order in which they began."""
        found = [span for span in list(self.spans) if (span.trace, span.parent) == (parent.trace, parent.id)]
        return sorted(found, key=lambda span: (span.began, span.ended))


def _received(span: Any, process: dict[str, Any]) -> Received:
    return Received(
        process["service.name"],
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        _values(span.attributes),
        process,
        span.status.code,
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
