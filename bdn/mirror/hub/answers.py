"""Answers to hub clients, with the fields and headers of the hub's own."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs

from bdn.core.errors import BdnError, UpstreamUnavailableError
from bdn.core.listing import ListedFile
from bdn.core.source.upstream import ChecksumKind
from bdn.sources.huggingface.forwarding import HubReply
from bdn.wire.hub_schema import HubAnswer, HubRequest
from bdn.wire.shapes import status_of

_JSON: Final = {"content-type": "application/json; charset=utf-8"}


class HubRefusalError(Exception):
    def __init__(self, answer: HubAnswer) -> None:
        super().__init__()
        self.answer = answer


@dataclass(frozen=True)
class ResolvedCommit:
    """``refusal`` is the hub's answer to a caller who may not read its files. ``is_stale``: as the hub said it last."""

    sha: str
    refusal: HubAnswer | None = None
    is_stale: bool = False


def parsed(body: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(body)
    except ValueError:
        return None


def _without_xet(found: Any) -> Any:  # noqa: ANN401 - JSON
    """Without names that lead clients to the hub's xet storage."""
    if isinstance(found, dict):
        return {name: _without_xet(value) for name, value in found.items() if name != "xetHash"}
    return [_without_xet(one) for one in found] if isinstance(found, list) else found


def answer_of(reply: HubReply) -> HubAnswer:
    headers, document = dict(reply.headers), parsed(reply.body)
    body = reply.body.decode("utf-8", "replace") if document is None else json.dumps(_without_xet(document))
    if reply.next_page is not None:
        headers["link"] = f'<{reply.next_page}>; rel="next"'
    if reply.moved_to is not None:
        headers["location"] = reply.moved_to
    return HubAnswer(status=reply.status, headers=headers, body=body)


def _commit_headers(commit: ResolvedCommit) -> dict[str, str]:
    stale = "bdn; the hub does not answer: this is what BDN holds, as the hub said it last"
    return {"x-repo-commit": commit.sha, **({"x-hf-warning": stale} if commit.is_stale else {})}


def json_answer(document: object, commit: ResolvedCommit) -> HubAnswer:
    return HubAnswer(headers={**_JSON, **_commit_headers(commit)}, body=json.dumps(document))


def refusal(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> HubAnswer:
    message = message.encode("latin-1", "replace").decode("latin-1").replace("\n", " ")
    coded = {"x-error-code": code} if code else {}
    said = {**_JSON, **(headers or {}), **coded, "x-error-message": message}
    return HubAnswer(status=status, headers=said, body=json.dumps({"error": message}))


def failure(error: BdnError) -> HubAnswer:
    """Why a file was not copied. Never 401, which clients take for "no such repository"."""
    status = status_of(error)
    if isinstance(error, UpstreamUnavailableError) or error.code == UpstreamUnavailableError.code:
        status = 504
    return refusal(403 if status == 401 else status, "", str(error))


def not_there(commit: ResolvedCommit) -> HubAnswer:
    return refusal(404, "EntryNotFound", "Entry not found", _commit_headers(commit))


def file_headers(file: Mapping[str, Any], commit: ResolvedCommit) -> dict[str, str]:
    lfs = file.get("lfs")
    etag = lfs["oid"] if isinstance(lfs, dict) else file["oid"]
    headers = {"etag": f'"{etag}"', "accept-ranges": "bytes", "content-length": str(int(file["size"]))}
    return {**_commit_headers(commit), **headers, "content-type": "application/octet-stream"}


def file_entry(file: ListedFile) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": file.path, "size": file.size, "oid": file.git_name or ""}
    if file.checksum_kind == ChecksumKind.SHA256:
        entry["lfs"] = {"oid": file.checksum, "size": file.size, "pointerSize": len(_pointer(file))}
    return entry


def _pointer(file: ListedFile) -> str:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{file.checksum}\nsize {file.size}\n"


def _folder_entry(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}


def entries_below(tree: Mapping[str, ListedFile], folder: str, *, is_recursive: bool) -> list[dict[str, Any]]:
    """Files and folders below a folder, by path."""
    below = f"{folder}/" if folder else ""
    found: dict[str, dict[str, Any]] = {}
    for path, file in tree.items():
        if not path.startswith(below):
            continue
        names = path[len(below) :].split("/")
        for depth in range(1, len(names) if is_recursive else min(2, len(names))):
            found.setdefault(one := below + "/".join(names[:depth]), _folder_entry(one))
        if is_recursive or len(names) == 1:
            found[path] = file_entry(file)
    return [found[path] for path in sorted(found)]


def paths_of(request: HubRequest) -> list[str]:
    if "json" in request.content_type:
        found = parsed(request.body.encode())
        paths = found.get("paths", []) if isinstance(found, dict) else []
        return [str(path) for path in (paths if isinstance(paths, list) else [paths])]
    return parse_qs(request.body).get("paths", [])


def paths_info(tree: Mapping[str, ListedFile], paths: Iterable[str]) -> Iterator[dict[str, Any]]:
    for path in paths:
        name = path.strip("/")
        if name in tree:
            yield file_entry(tree[name])
        elif any(other.startswith(f"{name}/") for other in tree):
            yield _folder_entry(name)
