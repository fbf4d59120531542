"""The documents and refusals of the hub double, in the shapes that the real client reads."""

import json
from collections.abc import Mapping
from urllib.parse import quote

from tests.doubles.http_origin import Answer
from tests.doubles.hub_repository import Commit, HubFile, HubRepository, Json


def description(repository: HubRepository, commit: Commit, query: Mapping[str, list[str]]) -> Json:
    blobs = "blobs" in query
    siblings: list[Json] = [
        {"rfilename": file.path, **({"size": file.size, "blobId": file.oid} if blobs else {})}
        for file in ([] if "expand" in query else commit.files.values())
    ]
    properties: dict[str, Json] = {
        "sha": commit.sha,
        "private": repository.private,
        "gated": repository.gated,
        "disabled": repository.disabled,
        "lastModified": "2026-01-02T03:04:05.000Z",
        "tags": [],
        "siblings": siblings,
    }
    if "expand" in query:
        properties = {name: value for name, value in properties.items() if name in query["expand"]}
    return {"_id": "6512bd43d9caa6e02c990b0a", "id": repository.repo_id, **properties}


def file_answer(file: HubFile, headers: Mapping[str, str]) -> Answer:
    name = quote(file.path.rpartition("/")[2])
    more = {"ETag": file.etag, "Content-Type": "text/plain", "Content-Disposition": f"inline; filename*=UTF-8''{name}"}
    return Answer(200, {**headers, **more}, file.content, ranged=True)


def gated_refusal(repository: HubRepository, *, anonymous: bool) -> Answer:
    what = f"Access to {repository.kind} {repository.repo_id} is restricted"
    if anonymous:
        return refusal(401, "GatedRepo", f"{what}. You must have access to it and be authenticated to access it.")
    return refusal(
        403, "GatedRepo", f"{what} and you are not in the authorized list. Visit the site to ask for access."
    )


def entry_not_found(commit: Commit) -> Answer:
    return refusal(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit.sha})


def refusal(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Answer:
    coded = {"X-Error-Code": code} if code else {}
    return json_answer(
        {"error": message}, status=status, headers={**(headers or {}), **coded, "X-Error-Message": message}
    )


def json_answer(document: Json, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    content_type = {"Content-Type": "application/json; charset=utf-8"}
    return Answer(status, {**content_type, **(headers or {})}, json.dumps(document).encode())
