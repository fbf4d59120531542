"""What the hub answers: its API, and its way to the bytes of a file."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import parse_qs, quote, unquote

from tests.doubles.cdn import Cdn
from tests.doubles.http_origin import Answer, Request
from tests.doubles.hub_answers import description, entry_not_found, file_answer, gated_refusal, json_answer, refusal
from tests.doubles.hub_repository import Commit, HubRepository, Kind

KINDS: dict[str, Kind] = {"models": "model", "datasets": "dataset", "spaces": "space"}
OPERATIONS = frozenset({"revision", "tree", "auth-check"})


@dataclass(frozen=True, slots=True)
class _Call:
    """A request about one repository, as its path tells. Segments are decoded one by one: a revision may hold slashes."""

    kind: Kind
    repo_id: str
    operation: str
    revision: str
    path: str


class HubApi:
    def __init__(self, cdn: Cdn, *, owner: str, stranger: str, page_size: int) -> None:
        self.url = ""
        self.repositories: dict[tuple[Kind, str], HubRepository] = {}
        self._cdn = cdn
        self._owner = owner
        self._stranger = stranger
        self._page_size = page_size

    def respond(self, request: Request) -> Answer:
        answer = self._respond(request)
        return replace(answer, headers={**answer.headers, "X-Request-Id": "Root=1-double"})

    def _respond(self, request: Request) -> Answer:
        path = request.url.path
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if path == "/api/agent-harnesses":
            return json_answer({"standardEnvVars": [], "harnesses": {}})
        if token not in ("", self._owner, self._stranger):
            return refusal(401, "", "Invalid credentials in Authorization header")
        call = _parse(path)
        if call is None:
            return json_answer({"error": "Sorry, we can't find the page you are looking for."}, status=404)
        return self._about(call, request, token)

    def _about(self, call: _Call, request: Request, token: str) -> Answer:
        repository = self.repositories.get((call.kind, call.repo_id))
        may_read = repository is not None and (token == self._owner or token in repository.readers)
        if repository is None or (repository.private and not may_read):
            # Strangers do not learn whether it exists.
            return refusal(404 if token else 401, "RepoNotFound", "Repository not found")
        if repository.disabled:
            return refusal(403, "", "Access to this resource is disabled.")
        # Descriptions and listings of gated repositories are open; the bytes are not (huggingface.js#945).
        if call.operation in ("auth-check", "resolve", "resolve-cache") and repository.gated and not may_read:
            return gated_refusal(repository, anonymous=not token)
        if call.operation == "auth-check":
            return json_answer({})
        return self._at_revision(repository, call, request)

    def _at_revision(self, repository: HubRepository, call: _Call, request: Request) -> Answer:
        commit, query = repository.find(call.revision), parse_qs(request.url.query)
        if commit is None:
            return refusal(404, "RevisionNotFound", f"Invalid rev id: {call.revision}")
        match call.operation:
            case "tree":
                return self._tree(commit, call, query, request.url.path)
            case "resolve" | "resolve-cache":
                return self._file(repository, commit, call)
            case _:
                return json_answer(description(repository, commit, query))

    def _tree(self, commit: Commit, call: _Call, query: Mapping[str, list[str]], path: str) -> Answer:
        below = f"{call.path}/" if call.path else ""
        entries = [entry for entry in commit.tree if str(entry["path"]).startswith(below)]
        if below and not entries:
            return entry_not_found(commit)
        if query.get("recursive", ["false"])[0].lower() != "true":
            entries = [entry for entry in entries if "/" not in str(entry["path"]).removeprefix(below)]
        start = int(base64.urlsafe_b64decode(query["cursor"][0])) if "cursor" in query else 0
        stop = start + self._page_size
        headers = {}
        if stop < len(entries):
            cursor = base64.urlsafe_b64encode(str(stop).encode()).decode()
            kept = "&".join(f"{name}={query[name][0]}" for name in ("recursive", "expand") if name in query)
            link = f"{self.url}{path}?{kept}&limit={self._page_size}&cursor={quote(cursor, safe='')}"
            headers["Link"] = f'<{link}>; rel="next"'
        return json_answer(entries[start:stop], headers=headers)

    def _file(self, repository: HubRepository, commit: Commit, call: _Call) -> Answer:
        file = commit.files.get(call.path)
        if file is None:
            return entry_not_found(commit)
        headers = {"X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes"}
        if file.is_lfs:
            linked = {"X-Linked-Size": str(file.size), "X-Linked-ETag": file.etag}
            location = self._cdn.link(file)
            if file.xet_hash:
                token = f"{self.url}/api/{call.kind}s/{call.repo_id}/xet-read-token/{commit.sha}"
                linked |= {"X-Xet-Hash": file.xet_hash, "Link": f'<{token}>; rel="xet-auth"'}
            return Answer(302, {**headers, **linked, "Location": location, "Content-Type": "text/plain"}, b"Found")
        # Small files of open repositories go round by a cacheable address; these others are answered in place.
        in_place = repository.private or repository.gated or "/" not in call.repo_id or file.size == 0
        if call.operation == "resolve-cache" or in_place:
            return file_answer(file, headers)
        name = quote(file.path)
        location = f"/api/resolve-cache/{call.kind}s/{call.repo_id}/{commit.sha}/{name}?etag={quote(file.etag)}"
        return Answer(307, {**headers, "Location": location, "Content-Type": "text/plain"}, b"Temporary Redirect")


def _parse(path: str) -> _Call | None:
    segments = [unquote(segment) for segment in path.strip("/").split("/")]
    if segments[:2] == ["api", "resolve-cache"] and len(segments) >= 6 and segments[2] in KINDS:
        return _Call(KINDS[segments[2]], "/".join(segments[3:5]), "resolve-cache", segments[5], "/".join(segments[6:]))
    api = segments[0] == "api" and len(segments) >= 3
    if api and segments[1] in KINDS:
        kind, rest = KINDS[segments[1]], segments[2:]
        length = 1 if len(rest) == 1 or rest[1] in OPERATIONS else 2
        operation, revision = (*rest[length:], "", "")[:2]
        return _Call(kind, "/".join(rest[:length]), operation, revision or "main", "/".join(rest[length + 2 :]))
    kind = KINDS.get(segments[0], "model")
    rest = segments[1:] if segments[0] in KINDS else segments
    if "resolve" not in rest[1:3]:
        return None
    at = rest.index("resolve", 1)
    return _Call(kind, "/".join(rest[:at]), "resolve", (*rest[at + 1 :], "")[0], "/".join(rest[at + 2 :]))
