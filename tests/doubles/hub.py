"""A double of the Hugging Face hub that the real ``huggingface_hub`` client cannot tell from the real one.

    with Hub() as hub:
        repo = hub.repo("org/model")
        sha = repo.commit({"config.json": b"{}", "model.safetensors": GeneratedContent(20 * 1024**3)})
        HfApi(endpoint=hub.url, token=False).repo_info("org/model")

LFS files are redirected to a second origin, the "CDN", by signed links that expire. Repositories with ``is_xet`` say so in
listings and heads, as the hub's do, and are served by the CDN all the same: that is the hub's bridge for clients that do not
speak xet. The double gives out tokens for xet, and has no xet storage. What the real hub does was read from the client's
source, its issues (huggingface_hub #4815, huggingface.js #945) and its documentation.
"""

import base64
import hmac
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal, Self
from urllib.parse import parse_qs, quote, unquote

from tests.doubles.faults import Fault, Script
from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.hub_bucket import BucketCall, HubBucket
from tests.doubles.hub_documents import commit_entry, discussions, expanded, refs, whoami
from tests.doubles.hub_repository import COMMITTED_AT, Commit, HubFile, HubRepository, Json, Kind
from tests.doubles.request_log import RequestLog

KINDS: dict[str, Kind] = {"models": "model", "datasets": "dataset", "spaces": "space", "kernels": "kernel"}
OPERATIONS = frozenset(
    {"revision", "tree", "auth-check", "paths-info", "refs", "commits", "discussions", "xet-read-token"}
)
OF_BYTES = frozenset({"auth-check", "resolve", "resolve-cache", "xet-read-token"})
LINK_SECONDS = 3600
XET_TOKEN = "xet_double"
EXPANDED_PAGE = 50  # entries of a page, at most, where each names its last commit; commits of a page


class Cdn(Origin):
    """The hub's second origin: content by digest, for those who hold a signed link and send no credentials."""

    def __init__(self, *, log: RequestLog, script: Script, host: str) -> None:
        super().__init__("cdn", self._respond, log=log, script=script, host=host)
        self._contents: dict[str, HubFile] = {}
        self._key = b"first"

    def link(self, file: HubFile) -> str:
        """An address that is good for an hour."""
        path = f"/repos/{file.sha256[:2]}/{file.sha256}"
        self._contents[path] = file
        expires = str(int(time.time()) + LINK_SECONDS)
        name = quote(file.path.rpartition("/")[2], safe="")
        return f"{self.url}{path}?filename={name}&Expires={expires}&Signature={self._sign(path, expires)}"

    def expire_links(self) -> None:
        self._key += b"+"

    def _respond(self, request: Request) -> Answer:
        if "authorization" in request.headers:
            # S3 and CloudFront refuse two ways of signing at once; here it proves that a token leaked.
            return Answer(400, {}, b"Only one auth mechanism allowed")
        query = parse_qs(request.url.query)
        expires, signature = query.get("Expires", ["0"])[0], query.get("Signature", [""])[0]
        if not hmac.compare_digest(signature, self._sign(request.url.path, expires)) or int(expires) < time.time():
            return Answer(403, {"Content-Type": "application/xml"}, b"<Error><Code>AccessDenied</Code></Error>")
        file = self._contents[request.url.path]
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", "ETag": f'"cdn-{file.oid}"'}
        return Answer(200, headers, file.content, ranged=True)

    def _sign(self, path: str, expires: str) -> str:
        return hmac.digest(self._key, f"{path} {expires}".encode(), "sha256").hex()


@dataclass(frozen=True, slots=True)
class _Call:
    """A request about one repository, as its path tells. Segments are decoded one by one: a revision may hold slashes."""

    kind: Kind
    repo_id: str
    operation: str
    revision: str
    path: str


class Hub:
    """Hub and CDN on free ports of ``host``, from ``with`` until its end.

    ``token`` belongs to the owner of every repository; ``stranger_token``, like each that :meth:`user` returns, is valid, but
    may read only what is open and what :meth:`HubRepository.allow` gives it.
    """

    token = "hf_owner"
    stranger_token = "hf_stranger"

    def __init__(self, *, page_size: int = 1000, host: str = "127.0.0.1") -> None:
        self.log = RequestLog()
        self.script = Script()
        self.repositories: dict[tuple[Kind, str], HubRepository] = {}
        self.buckets: dict[str, HubBucket] = {}
        self._names = {self.token: "owner", self.stranger_token: "stranger"}
        self._page_size = page_size
        self.moved: dict[str, str] = {}  # new names of repositories, by their old ones
        self.links_to: str | None = None  # what a link to the next page begins with; None: the hub's own address
        self._origin = Origin("hub", self._respond, log=self.log, script=self.script, host=host)
        self._cdn = Cdn(log=self.log, script=self.script, host=host)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._cdn)
        self._stack.enter_context(self._origin)
        return self

    def __exit__(self, *_: object) -> None:
        self.release_stalled()
        self._stack.close()

    @property
    def url(self) -> str:
        return self._origin.url

    @property
    def cdn_url(self) -> str:
        return self._cdn.url

    def repo(
        self,
        repo_id: str,
        *,
        kind: Kind = "model",
        private: bool = False,
        gated: Literal["auto", "manual"] | bool = False,
    ) -> HubRepository:
        """A new, empty repository."""
        repository = HubRepository(repo_id, kind, private, "manual" if gated is True else gated)
        self.repositories[kind, repo_id] = repository
        return repository

    def user(self, name: str) -> str:
        """A new token of an account without any repository."""
        token = f"hf_{name}{secrets.token_hex(8)}"
        self._names[token] = name
        return token

    def bucket(self, bucket_id: str, *, private: bool = False, sends_bytes: bool = False) -> HubBucket:
        """A new, empty bucket."""
        self.buckets[bucket_id] = HubBucket(bucket_id, private, sends_bytes)
        return self.buckets[bucket_id]

    def fail(
        self, fault: Fault, path: str = "", *, times: int | None = 1, skip: int = 0, origin: str | None = None
    ) -> None:
        """Order a failure; see :class:`tests.doubles.faults.Script`."""
        self.script.add(fault, path, times=times, skip=skip, origin=origin)

    def clear(self) -> None:
        """Forget repositories, buckets, requests and ordered failures; addresses stay. Stalls stall again."""
        self.stall_again()
        self.repositories.clear()
        self.buckets.clear()
        self.links_to = None
        self.moved.clear()
        self.log.clear()
        self.script.clear()

    def expire_links(self) -> None:
        """Every link of the CDN that was given out so far answers 403 from now on."""
        self._cdn.expire_links()

    @property
    def most_at_once(self) -> dict[str, int]:
        """The most requests that were under way at the same time, by origin."""
        return {origin.name: origin.most_at_once for origin in (self._origin, self._cdn)}

    def stall_again(self) -> None:
        """Undo :meth:`release_stalled`."""
        self._origin.go_on.clear()
        self._cdn.go_on.clear()

    def release_stalled(self) -> None:
        """Stalled answers go on, and no later one stalls before :meth:`clear` or :meth:`stall_again`."""
        self._origin.go_on.set()
        self._cdn.go_on.set()

    def _respond(self, request: Request) -> Answer:
        answer = self._answer(request)
        return replace(answer, headers={**answer.headers, "X-Request-Id": "Root=1-double"})

    def _answer(self, request: Request) -> Answer:
        path = request.url.path
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if path == "/api/agent-harnesses":
            return json_answer({"standardEnvVars": [], "harnesses": {}})
        if token not in ("", *self._names) or (path == "/api/whoami-v2" and not token):
            return refusal(401, "", "Invalid credentials in Authorization header")
        if path == "/api/whoami-v2":
            return json_answer(whoami(self._names[token]))
        if bucket_call := BucketCall.of(path):
            return self._about_bucket(bucket_call, request, token)
        call = _parse(path)
        if call is None:
            return json_answer({"error": "Sorry, we can't find the page you are looking for."}, status=404)
        return self._about(call, request, token)

    def _about(self, call: _Call, request: Request, token: str) -> Answer:
        if (name := self.moved.get(call.repo_id)) is not None:
            location = request.target.replace(f"/{call.repo_id}", f"/{name}", 1)
            return Answer(307, {"Location": location, "Content-Type": "text/plain"}, b"Temporary Redirect")
        repository = self.repositories.get((call.kind, call.repo_id))
        may_read = repository is not None and (token == self.token or token in repository.readers)
        if repository is None or (repository.private and not may_read):
            return hidden(token)
        if repository.disabled:
            return refusal(403, "", "Access to this resource is disabled.")
        # Descriptions and listings of gated repositories are open; the bytes are not (huggingface.js#945).
        if call.operation in OF_BYTES and repository.gated and not may_read:
            return gated_refusal(repository, anonymous=not token)
        match call.operation:
            case "auth-check":
                answer = json_answer({})
            case "refs":
                answer = json_answer(refs(repository, parse_qs(request.url.query)))
            case "discussions":
                answer = json_answer(discussions(repository))
            case _:
                answer = self._at_revision(repository, call, request)
        return answer

    def _at_revision(self, repository: HubRepository, call: _Call, request: Request) -> Answer:
        commit, query = repository.find(call.revision), parse_qs(request.url.query)
        if commit is None:
            return refusal(404, "RevisionNotFound", f"Invalid rev id: {call.revision}")
        match call.operation:
            case "tree":
                answer = self._tree(commit, call, query, request.url.path)
            case "paths-info":
                answer = paths_info(commit, parse_qs(request.body.decode()))
            case "commits":
                answer = self._commits(commit, query, request.url.path)
            case "xet-read-token":
                answer = self._xet_token(repository)
            case "resolve" | "resolve-cache":
                answer = self._file(repository, commit, call)
            case _:
                answer = json_answer(description(repository, commit, query))
        return answer

    def _xet_token(self, repository: HubRepository) -> Answer:
        if not repository.is_xet:
            return refusal(404, "", "Not found")
        expires = int(time.time()) + LINK_SECONDS
        document: Json = {"casUrl": f"{self.cdn_url}/xet", "exp": expires, "accessToken": XET_TOKEN}
        headers = {
            "X-Xet-Cas-Url": f"{self.cdn_url}/xet",
            "X-Xet-Access-Token": XET_TOKEN,
            "X-Xet-Token-Expiration": str(expires),
        }
        return json_answer(document, headers=headers)

    def _commits(self, commit: Commit, query: Mapping[str, list[str]], path: str) -> Answer:
        history = list(commit.history)
        size, page = int(query.get("limit", [str(EXPANDED_PAGE)])[0]), int(query.get("p", ["0"])[0])
        start, stop = size * page, size * (page + 1)
        headers = {"X-Total-Count": str(len(history))}
        if stop < len(history):
            headers["Link"] = f'<{self.links_to or self.url}{path}?p={page + 1}&limit={size}>; rel="next"'
        return json_answer([commit_entry(one) for one in history[start:stop]], headers=headers)

    def _about_bucket(self, call: BucketCall, request: Request, token: str) -> Answer:
        bucket = self.buckets.get(call.bucket_id)
        if bucket is None or (bucket.private and token != self.token):
            return hidden(token)
        query = parse_qs(request.url.query)
        match request.method, call.operation:
            case "GET", "":
                return json_answer(bucket.description)
            case "GET", "tree":
                entries = bucket.tree(call.path, recursive=query.get("recursive") == ["true"])
                return self._page(entries, query, request.url.path)
            case "POST", "paths-info":
                return json_answer(bucket.paths_info(json.loads(request.body)["paths"]))
            case "GET" | "HEAD", "resolve":
                return self._bucket_file(bucket, call.path, request)
            case _:
                return refusal(404, "", "Not found")

    def _bucket_file(self, bucket: HubBucket, name: str, request: Request) -> Answer:
        file = bucket.files.get(name)
        if file is None:
            return refusal(404, "EntryNotFound", "Entry not found")
        link = f'<{self.url}/api/buckets/{bucket.bucket_id}/xet-read-token>; rel="xet-auth"'
        headers = {"X-Xet-Hash": file.xet_name, "Link": link, "Accept-Ranges": "bytes"}
        if bucket.sends_bytes:
            if request.headers.get("if-match", file.etag) != file.etag:
                return refusal(412, "", "Precondition Failed")
            return file_answer(file, headers)
        linked = {"X-Linked-Size": str(file.size), "Location": self._cdn.link(file), "Content-Type": "text/plain"}
        return Answer(302, {**headers, **linked}, b"Found")

    def _tree(self, commit: Commit, call: _Call, query: Mapping[str, list[str]], path: str) -> Answer:
        below = f"{call.path}/" if call.path else ""
        entries = [entry for entry in commit.tree if str(entry["path"]).startswith(below)]
        if below and not entries:
            return entry_not_found(commit)
        if not is_true(query, "recursive"):
            entries = [entry for entry in entries if "/" not in str(entry["path"]).removeprefix(below)]
        if not is_true(query, "expand"):
            return self._page(entries, query, path)
        size = min(self._page_size, EXPANDED_PAGE)
        return self._page([expanded(commit, entry) for entry in entries], query, path, size)

    def _page(
        self, entries: Sequence[Json], query: Mapping[str, list[str]], path: str, page_size: int | None = None
    ) -> Answer:
        size = page_size or self._page_size
        start = int(base64.urlsafe_b64decode(query["cursor"][0])) if "cursor" in query else 0
        stop = start + size
        headers = {}
        if stop < len(entries):
            cursor = base64.urlsafe_b64encode(str(stop).encode()).decode()
            kept = "&".join(f"{name}={query[name][0]}" for name in ("recursive", "expand") if name in query)
            link = f"{self.links_to or self.url}{path}?{kept}&limit={size}&cursor={quote(cursor, safe='')}"
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
        "lastModified": COMMITTED_AT,
        "tags": [],
        "siblings": siblings,
    }
    if "expand" in query:
        properties = {name: value for name, value in properties.items() if name in query["expand"]}
    return {"_id": "6512bd43d9caa6e02c990b0a", "id": repository.repo_id, **properties}


def is_true(query: Mapping[str, list[str]], name: str) -> bool:
    return query.get(name, ["false"])[0].lower() == "true"


def paths_info(commit: Commit, form: Mapping[str, list[str]]) -> Answer:
    """Entries of the tree; a path that does not exist is ignored."""
    entries = [entry for entry in commit.tree if entry["path"] in form.get("paths", [])]
    return json_answer([expanded(commit, entry) for entry in entries] if is_true(form, "expand") else entries)


def file_answer(file: HubFile, headers: Mapping[str, str]) -> Answer:
    name = quote(file.path.rpartition("/")[2])
    more = {"ETag": file.etag, "Content-Type": "text/plain", "Content-Disposition": f"inline; filename*=UTF-8''{name}"}
    return Answer(200, {**headers, **more}, file.content, ranged=True)


def hidden(token: str) -> Answer:
    """Strangers do not learn whether it exists."""
    return refusal(404 if token else 401, "RepoNotFound", "Repository not found")


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
