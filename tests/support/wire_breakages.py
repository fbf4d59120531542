"""One small change each that makes ``bdn/wire`` wrong: file, breakage, old, new."""

from __future__ import annotations

from tests.support.bytes_breakages import STORE, TRANSFER, Breakage

WIRE: list[Breakage] = [
    ("wire/ranges.py", "a range may reach past the end", "stop = min(size, int(match[2]) + 1)", "stop = int(match[2]) + 1"),
    ("wire/ranges.py", "the last byte is left out", "byte_range.stop - 1}/{size}", "byte_range.stop - 2}/{size}"),
    ("wire/ranges.py", "a suffix longer than the chunk is an error", "max(0, size - int(match[2]))", "size - int(match[2])"),
    ("wire/ranges.py", "an impossible Content-Range is believed", " < int(match[3])", ""),
    (
        "wire/chunk_server.py",
        "nobody is asked for permission",
        '            self.shelf.authorize(bearer.strip() if scheme.lower() == "bearer" else None, digest)\n',
        "",
    ),
    (
        "wire/chunk_server.py",
        "every scheme is a bearer",
        'bearer.strip() if scheme.lower() == "bearer" else None',
        "bearer.strip() or None",
    ),
    ("wire/chunk_server.py", "416 does not tell the size", 'f"bytes */{chunk.size}"', '"bytes */*"'),
    ("wire/chunk_server.py", "a range of a slab begins at the slab", "chunk.offset + part_or_whole.start", "part_or_whole.start"),
    ("wire/chunk_server.py", "the file stays open", "        with chunk.file:\n", "        if chunk.file:\n"),
    ("wire/chunk_server.py", "a body is taken for the next request", '"Transfer-Encoding" in self.headers or ', ""),
    ("wire/chunk_server.py", "a cut file leaves the client waiting", "if sent != size:", "if sent > size:"),
    ("wire/chunk_server.py", "a bug is logged where nobody looks", "else logging.ERROR", "else logging.DEBUG"),
    ("wire/chunk_server.py", "closing leaves the clients connected", "        self._server.close_connections()\n", ""),
    ("wire/chunk_server.py", "closing keeps the port", "        self._server.server_close()\n", ""),
    ("wire/chunk_server.py", "HTTP/1.0: every request needs a connection", '"HTTP/1.1"', '"HTTP/1.0"'),
    ("wire/paths.py", "a chunk is found below any path", 'if prefix != "/chunks":', 'if not prefix.endswith("/chunks"):'),
    ("wire/grants.py", "a grant never ends", "if grant.expires_at <= now:", "if grant.expires_at < 0:"),
    ("wire/grants.py", "a grant ends a moment late", "if grant.expires_at <= now:", "if grant.expires_at < now:"),
    ("wire/grants.py", "a grant for anybody is accepted", '"verify_exp": False}', '"verify_exp": False, "verify_aud": False}'),
    ("wire/grants.py", "the signature is not checked", '"verify_exp": False}', '"verify_exp": False, "verify_signature": False}'),
    ("wire/grants.py", "anybody's token is a grant of the mirror", "                issuer=ISSUER,\n", ""),
    ("wire/grants.py", "an unknown key is just an invalid grant", "raise UnknownKeyError(", "raise GrantInvalidError("),
    ("wire/errors.py", "a gateway's answer is a bug of ours", "if status in (502, 503, 504):", "if status == 0:"),
    ("wire/errors.py", "a reported error is never retryable", "self.transient = self.body.retryable", "self.transient = False"),
    ("wire/errors.py", "the facts are not sent", ", details=error.details())", ")"),
    ("wire/weights_schema.py", "both forms at once are accepted", "(self.weights is None) == (self.training_job is None)", "self.weights is self.training_job"),
    ("wire/weights_schema.py", "nested mounts are accepted", "        check_mounts([source.mount_location for source in sources])\n", ""),
    ("wire/weights_schema.py", "no source at all is accepted", "        if not bodies:\n", "        if bodies is None:\n"),
    ("wire/weights_schema.py", "auth_secret_name is ignored", "if name else None", "if not name else None"),
    (
        "wire/weights_schema.py",
        "an unknown field of a source is ignored",
        '    """One source of a request."""\n\n    model_config = ConfigDict(extra="forbid")',
        '    """One source of a request."""\n\n    model_config = ConfigDict(extra="ignore")',
    ),
    (
        "wire/weights_schema.py",
        "the rest of a training job is refused",
        'model_config = ConfigDict(extra="ignore")',
        'model_config = ConfigDict(extra="forbid")',
    ),
    ("wire/service.py", "a refusal repeats the value", 'else problem["msg"]', 'else f"{problem[\'msg\']}: {problem[\'input\']}"'),
    ("wire/service.py", "405 does not tell what is allowed", ", error.status_code, error.headers)", ", error.status_code)"),
    ("wire/service.py", "a body of unknown length is not limited", "            if received > self._limit:\n", "            if received < 0:\n"),
    ("wire/service.py", "an announced body is not limited in our words", "and int(announced) > self._limit:", "and int(announced) < 0:"),
    ("wire/service.py", "a bug tells its message", "InternalError(type(error).__name__)", "InternalError(str(error))"),
    ("wire/client.py", "a manifest is not compared with its name", ") != digest:", ") is None:"),
    ("wire/client.py", "a service that is away raises the library's error", "except httpx2.TransportError as error:", "except KeyError as error:"),
    ("wire/client.py", "a layout is not checked", "(file.to_core() for file in body.files)", "(FileLayout.of(file.size, tuple(Digest.parse(chunk) for chunk in file.chunks)) for file in body.files)"),
    ("wire/http_server.py", "a canceled block cuts the server off", "                await asyncio.wait([task])  #", "                pass  #"),
]  # fmt: skip

BREAKAGES = [*STORE, *TRANSFER, *WIRE]
