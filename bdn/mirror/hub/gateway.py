"""Answers hub clients: from the hub, once for many callers, or from what the mirror holds.

A caller's token is sent to the hub, and kept nowhere: what callers share is found by its keyed digest. Files are copied
with the credentials of one organisation, which the operator names; the caller's token only shows that its owner may read
the repository.
"""

import asyncio
import fnmatch
import hmac
import json
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Self
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from bdn.core.chunk import Digest
from bdn.core.errors import BdnError, InternalError, NotFoundError, UpstreamUnavailableError, single_error
from bdn.core.listing import ListedFile
from bdn.core.source.upstream import ChecksumKind, Identity
from bdn.core.source.uri import (
    COMMIT,
    COUNT_LIMIT,
    Auth,
    AuthMethod,
    Patterns,
    WeightsSource,
    select,
)
from bdn.core.store import PUBLIC
from bdn.mirror.db import events, manifests, mirrors
from bdn.mirror.db.tables import MirrorSourceRow
from bdn.mirror.db.waiting import SharedReads
from bdn.mirror.hub.calls import HubCall
from bdn.mirror.ingest.requests import MirrorRequests
from bdn.mirror.settings import MirrorSettings
from bdn.sources.huggingface.forwarding import HubForwarder, HubReply
from bdn.wire.grants import Grant, GrantedMount
from bdn.wire.http_fields import LONGEST_WAIT_SECONDS
from bdn.wire.hub_schema import HubAnswer, HubContent, HubRequest
from bdn.wire.mirror_schema import TERMINAL, Mirror, WeightsSourceBody
from bdn.wire.shapes import ReportedError, status_of

logger = logging.getLogger(__name__)
_SHARED_SECONDS: Final = 30.0  # of an answer of the hub, for all callers with the same token
_SILENT_SECONDS: Final = 10.0
_SHARED_BYTES: Final = 64 * 1024**2  # beyond these, only concurrent callers share answers
_MOUNT: Final = "/gateway"  # of mirrors that clients' requests began
_PAGE: Final = 1000  # entries of a tree, as at the hub
_FAILED_SECONDS: Final = 10.0  # until a copy that failed is tried again
_REMEMBERED: Final = 10_000  # commits with the branch that named them
_REPLACED: Final = "hub gateway: a newer manifest has its files"
_JSON: Final = {"content-type": "application/json; charset=utf-8"}
_UNANSWERED: Final = "the hub does not answer, and BDN does not hold this"


class _RefusedError(Exception):
    def __init__(self, answer: HubAnswer) -> None:
        super().__init__()
        self.answer = answer


class _HubSilentError(Exception):
    """The hub does not answer, and nothing that the mirror holds may be given instead."""


@dataclass(frozen=True)
class _Commit:
    """``refusal`` is the hub's answer to a caller who may not read its files. ``is_stale``: as the hub said it last."""

    sha: str
    refusal: HubAnswer | None = None
    is_stale: bool = False


@dataclass(frozen=True)
class GatewayRules:
    """``organisation`` "": the mirror answers no gateway. ``largest`` bytes of a file; None means no limit."""

    organisation: str
    secret: str | None
    allow: tuple[str, ...]
    deny: tuple[str, ...]
    largest: int | None

    @classmethod
    def of(cls, settings: MirrorSettings) -> Self:
        allow, deny = (
            tuple(globs.replace(",", " ").split()) for globs in (settings.gateway_allow, settings.gateway_deny)
        )
        return cls(settings.gateway_organisation, settings.gateway_secret, allow, deny, settings.gateway_limit)

    def check(self, repo_id: str) -> None:
        is_allowed, is_denied = (
            any(fnmatch.fnmatchcase(repo_id, glob) for glob in globs) for globs in (self.allow, self.deny)
        )
        if is_denied or not is_allowed:
            raise _RefusedError(_refusal(403, "", f"the operator of this gateway does not allow {repo_id}"))

    def check_size(self, path: str, size: int) -> None:
        if self.largest is not None and size > self.largest:
            said = f"{path} has {size} bytes, and BDN_GATEWAY_LIMIT of this gateway's mirror is {self.largest}"
            raise _RefusedError(_refusal(403, "", said))


@dataclass
class HubGateway:
    """One per process of the mirror.

    ``on_bypass`` is called when a client gets a token for the hub's xet storage: it listed the commit at the hub itself.
    """

    rules: GatewayRules
    hub: HubForwarder
    requests: MirrorRequests
    on_bypass: Callable[[], object]
    _replies: SharedReads[tuple[str, ...], HubReply | None] = field(
        default_factory=partial(SharedReads, _SHARED_SECONDS)
    )
    _concurrent: SharedReads[tuple[str, ...], HubReply | None] = field(default_factory=partial(SharedReads, 0.0))
    _is_silent: bool = False  # the hub, until ``_ask_at`` at least
    _ask_at: float = 0.0
    _shared_bytes: int = 0  # of requests and answers in ``_replies``; without a bound, callers could fill the memory
    _trees: SharedReads[str, dict[str, ListedFile] | None] = field(
        default_factory=partial(SharedReads, _SHARED_SECONDS)
    )
    _key: bytes = field(default_factory=partial(secrets.token_bytes, 32), repr=False)
    _named: OrderedDict[tuple[str, str], str] = field(
        default_factory=OrderedDict
    )  # revisions, by repository and commit
    # Of each commit the paths that its next mirror brings; a future ends when its path is there, or has failed.
    _wanted: dict[str, dict[str, asyncio.Future[None]]] = field(default_factory=dict)
    _bringing: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _group: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)
    _running: dict[str, str] = field(default_factory=dict)  # mirrors, by commit
    _failed: dict[tuple[str, str], tuple[BdnError, float]] = field(default_factory=dict)  # and until when that is known

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While the block lasts, files are copied. A mirror that was requested goes on after it."""
        with single_error():
            async with self._group:
                try:
                    yield
                finally:
                    for task in self._bringing.values():
                        task.cancel()

    async def answer(self, request: HubRequest, wait_seconds: float) -> HubAnswer:
        """Answer a client's request. Waits for a file that is being copied, then returns ``is_pending``.

        Raises ``NotFoundError``: the operator named no organisation for gateways.
        """
        if not self.rules.organisation:
            raise NotFoundError("a gateway: the mirror's operator names its organisation with BDN_GATEWAY_ORGANISATION")
        path = urlsplit(request.target).path
        call = HubCall.of(path)
        try:
            if request.method == "POST" and (call is None or call.operation != "paths-info"):
                return _refusal(405, "", "this gateway only reads")
            if call is None:
                return await self._about_no_repository(request, path)
            self.rules.check(call.repo_id)
            return await self._about(call, request, wait_seconds)
        except _RefusedError as refused:
            return refused.answer
        except _HubSilentError:
            return _refusal(504, "", _UNANSWERED)
        except BdnError as error:
            return _failure(error)

    async def _about_no_repository(self, request: HubRequest, path: str) -> HubAnswer:
        if path == "/api/whoami-v2":
            return _answer_of(await self._ask(request))
        return _refusal(404, "", "Not found")

    async def _about(self, call: HubCall, request: HubRequest, wait_seconds: float) -> HubAnswer:
        match call.operation:
            case "resolve":
                return await self._file(call, request, wait_seconds)
            case "tree" | "paths-info":
                return await self._listing(call, request)
            case "" | "revision":
                return await self._description(call, request)
            case "refs":
                reply = await self._share(request)
                return await self._refs(call) if reply is None else _answer_of(reply)
            case "xet-read-token":
                self.on_bypass()
                return await self._xet_token(request)
            case _:
                return _answer_of(await self._ask(request))

    # --- the hub ---

    async def _ask(self, request: HubRequest) -> HubReply:
        reply = await self._share(request)
        if reply is None:
            raise _HubSilentError
        return reply

    async def _xet_token(self, request: HubRequest) -> HubAnswer:
        """A credential, so callers do not share it, and no part of it is kept."""
        reply = await self.hub.ask(request.method, request.target, request.authorization, is_xet=True)
        if reply is None:
            raise _HubSilentError
        return HubAnswer(status=reply.status, headers=dict(reply.headers), body=reply.body.decode("utf-8", "replace"))

    async def _share(self, request: HubRequest) -> HubReply | None:
        """The hub's answer, requested once for callers with the same token. None: the hub is silent."""
        token = hmac.digest(self._key, (request.authorization or "").encode(), "sha256").hex()
        key = (request.method, request.target, request.content_type, request.body, token)
        reads = self._replies if self._shared_bytes < _SHARED_BYTES else self._concurrent
        read = reads.of(key, partial(self._requested, request))
        reply = await read.get()
        if reply is None or reply.status == 429:
            read.forget()  # the hub may answer the next request
        return reply

    async def _requested(self, request: HubRequest) -> HubReply | None:
        """While the hub is silent, one request in ten seconds asks whether it still is; the others do not wait for it."""
        if self._is_silent and time.monotonic() < self._ask_at:
            return None
        self._ask_at = time.monotonic() + _SILENT_SECONDS
        reply = await self.hub.ask(
            request.method,
            request.target,
            request.authorization,
            content_type=request.content_type,
            body=request.body,
        )
        self._is_silent, self._ask_at = reply is None, time.monotonic() + _SILENT_SECONDS
        size = len(request.target) + len(request.body) + (len(reply.body) if reply else 0)
        self._note_shared(size)
        asyncio.get_running_loop().call_later(_SHARED_SECONDS, self._note_shared, -size)
        return reply

    def _note_shared(self, size: int) -> None:
        self._shared_bytes += size

    async def _commit(self, call: HubCall, request: HubRequest) -> _Commit:
        """The commit of the revision, and whether the caller may read its files."""
        fields = "" if call.kind in ("space", "kernel") else "?expand=sha&expand=private&expand=gated"
        target = f"{call.api}/revision/{quote(call.revision, safe='')}{fields}"
        question = HubRequest(method="GET", target=target, authorization=request.authorization)
        reply = await self._share(question)
        if reply is None:
            return await self._last_commit(call)
        if reply.moved_to is not None and (there := HubCall.of(urlsplit(reply.moved_to).path)) is not None:
            raise _RefusedError(HubAnswer(status=307, headers={"location": call.moved(request.target, there)}))
        if reply.status != 200:
            raise _RefusedError(_answer_of(reply))
        described = _document(reply.body)
        sha = str(described.get("sha") if isinstance(described, dict) else "")
        if not COMMIT.fullmatch(sha):
            raise _HubSilentError
        self._remember(call, sha)
        if not described.get("gated"):
            return _Commit(sha)
        checked = await self._ask(
            HubRequest(method="GET", target=f"{call.api}/auth-check", authorization=request.authorization)
        )
        return _Commit(sha, None if checked.status == 200 else _answer_of(checked))

    def _remember(self, call: HubCall, sha: str) -> None:
        if sha == call.revision:
            return
        key = str(call.repository), sha
        self._named[key] = call.revision
        self._named.move_to_end(key)
        while len(self._named) > _REMEMBERED:
            self._named.popitem(last=False)

    # --- while the hub is silent: public repositories as they were last ---

    async def _last_commit(self, call: HubCall) -> _Commit:
        sha = call.revision if COMMIT.fullmatch(call.revision) else (await self._revisions(call)).get(call.revision)
        tree = None if sha is None else await self._tree(call, sha)
        if sha is None or not tree or not self._is_public(call, next(iter(tree.values()))):
            raise _HubSilentError
        return _Commit(sha, is_stale=True)

    async def _revisions(self, call: HubCall) -> dict[str, str]:
        """Branches and tags with the commits that they named last."""
        async with self.requests.database.read() as session:
            found = await mirrors.revisions(session, self.rules.organisation, str(call.repository))
        default = found.pop("", None)
        return found if default is None else {"main": default, **found}

    def _is_public(self, call: HubCall, file: ListedFile) -> bool:
        """Whether the repository was public when it was listed: the identity of its files says so."""
        where = ("hf", self.hub.endpoint, call.kind, call.repo_id)
        return file.key == Identity.of(PUBLIC, *where, file.checksum or "", str(file.size)).key

    async def _tree(self, call: HubCall, sha: str) -> dict[str, ListedFile] | None:
        """All files of a commit, if the mirror holds their listing."""
        uri = replace(call.repository, revision=sha)
        read = self._trees.of(str(uri), partial(self.requests.trees.files, uri, self.rules.organisation))
        if (found := await read.get()) is None:
            read.forget()  # a mirror may bring it at any time
        return found

    # --- descriptions and listings ---

    async def _description(self, call: HubCall, request: HubRequest) -> HubAnswer:
        reply = await self._share(request)
        if reply is not None:
            described = _document(reply.body)
            if reply.status == 200 and isinstance(described, dict) and COMMIT.fullmatch(str(described.get("sha"))):
                self._remember(call, str(described["sha"]))
            return _answer_of(reply)
        commit = await self._last_commit(call)
        tree = await self._tree(call, commit.sha) or {}
        return _json_answer(
            {
                "id": call.repo_id,
                "sha": commit.sha,
                "private": False,
                "gated": False,
                "disabled": False,
                "tags": [],
                "siblings": [{"rfilename": path} for path in tree],
            },
            commit,
        )

    async def _refs(self, call: HubCall) -> HubAnswer:
        """What is held does not say which of them are tags."""
        commit = await self._last_commit(call)
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha}
            for name, sha in (await self._revisions(call)).items()
            if not COMMIT.fullmatch(name) and not name.startswith("refs/")
        ]
        return _json_answer({"branches": branches, "converts": [], "tags": [], "pullRequests": []}, commit)

    async def _listing(self, call: HubCall, request: HubRequest) -> HubAnswer:
        commit = await self._commit(call, request)
        tree = await self._tree(call, commit.sha)
        if tree is None:
            return _answer_of(await self._ask(request))
        query = parse_qs(urlsplit(request.target).query)
        if call.operation == "paths-info":
            return _json_answer(list(_paths_info(tree, _paths_of(request))), commit)
        is_recursive = query.get("recursive", [""])[0].lower() == "true"
        entries = await asyncio.to_thread(
            _entries, tree, call.path, is_recursive=is_recursive
        )  # a million files take a second
        if call.path and not entries:
            return _not_there(commit)
        start = int(query["cursor"][0]) if query.get("cursor", [""])[0].isdecimal() else 0
        answer = _json_answer(entries[start : start + _PAGE], commit)
        if start + _PAGE < len(entries):
            following = {**{name: values[0] for name, values in query.items()}, "cursor": str(start + _PAGE)}
            link = f"{urlsplit(request.target).path}?{urlencode(following)}"
            answer.headers["link"] = f'<{link}>; rel="next"'
        return answer

    # --- files ---

    async def _file(self, call: HubCall, request: HubRequest, wait_seconds: float) -> HubAnswer:
        commit = await self._commit(call, request)
        if commit.refusal is not None:
            return commit.refusal
        file = await self._entry(call, commit, request)
        answer, size = HubAnswer(headers=_file_headers(file, commit)), int(file["size"])
        if request.method == "GET":
            self.rules.check_size(call.path, size)
            row = await self._row(call, commit.sha)
            if row is None and commit.is_stale:
                raise _HubSilentError
            left: float | None = None
            if row is None:
                left = await self._bring(call, commit.sha, wait_seconds)
                row = await self._row(call, commit.sha)
            if row is None:
                return HubAnswer(is_pending=True, eta_seconds=left)
            answer.content = await self._content(row, call.path, size)
        return answer

    async def _entry(self, call: HubCall, commit: _Commit, request: HubRequest) -> Mapping[str, Any]:
        """What the listing or the hub says of one file."""
        tree = await self._tree(call, commit.sha)
        if tree is not None:
            if (file := tree.get(call.path)) is None:
                raise _RefusedError(_not_there(commit))
            return _file_entry(file)
        question = HubRequest(
            method="POST",
            target=f"{call.api}/paths-info/{commit.sha}",
            authorization=request.authorization,
            content_type="application/x-www-form-urlencoded",
            body=urlencode({"paths": call.path, "expand": "false"}),
        )
        reply = await self._ask(question)
        listed = _document(reply.body) if reply.status == 200 else []
        for one in listed if isinstance(listed, list) else []:
            if one.get("type") == "file" and one.get("path") == call.path:
                found: Mapping[str, Any] = one
                return found
        raise _RefusedError(_not_there(commit))

    async def _row(self, call: HubCall, sha: str) -> MirrorSourceRow | None:
        """A mirrored source with the file: the newest that clients began, else the smallest; a node makes room for all of it."""
        rows = [row for row in await self._rows(call, sha) if _selects(row, call.path)]
        began = [row for row in rows if row.mount_location == _MOUNT]
        return began[0] if began else min(rows, key=lambda row: row.bytes_total or 0, default=None)

    async def _rows(self, call: HubCall, sha: str) -> list[MirrorSourceRow]:
        async with self.requests.database.read() as session:
            return await mirrors.ready_at(session, self.rules.organisation, None, str(call.repository), sha)

    async def _content(self, row: MirrorSourceRow, path: str, size: int) -> HubContent:
        database = self.requests.database
        await manifests.note_use(database, str(row.manifest), database.now())
        mount = GrantedMount(_MOUNT, Digest(str(row.manifest)), row.source)
        grant = Grant(self.rules.organisation, (mount,), database.now() + self.requests.grant_seconds)
        return HubContent(manifest=f"b3:{row.manifest}", path=path, size=size, grant=self.requests.signer.sign(grant))

    async def _bring(self, call: HubCall, sha: str, wait_seconds: float) -> float | None:
        """Have the file copied. Files that are asked for while a mirror of the commit runs are in the next one.

        Returns when it is copied, or after ``wait_seconds`` the seconds that are left, if known. Raises why it was not
        copied.
        """
        name = str(replace(call.repository, revision=sha))
        self._check_failed(name, call.path)
        arrival = self._wanted.setdefault(name, {}).setdefault(call.path, asyncio.get_running_loop().create_future())
        if name not in self._bringing:
            task = self._bringing[name] = self._group.create_task(self._bring_wanted(call, sha, name))
            task.add_done_callback(lambda _: self._bringing.pop(name, None))
        await asyncio.wait([arrival], timeout=wait_seconds)
        self._check_failed(name, call.path)
        mirror = self._running.get(name)
        return None if mirror is None else (await self.requests.get(mirror, self.rules.organisation)).eta_seconds

    def _check_failed(self, name: str, path: str) -> None:
        error, until = self._failed.get((name, path), (None, 0.0))
        if error is not None and time.monotonic() < until:
            raise error

    async def _bring_wanted(self, call: HubCall, sha: str, name: str) -> None:
        while wanted := self._wanted.pop(name, None):
            rows = await self._rows(call, sha)
            missing = [path for path in wanted if not any(_selects(row, path) for row in rows)]
            try:
                if missing:
                    await self._bring_missing(call, sha, name, missing)
            except Exception as error:
                if not isinstance(error, BdnError):
                    logger.exception("files of %s are not copied because of a bug", name)
                self._note_failed(name, missing, error if isinstance(error, BdnError) else InternalError(repr(error)))
            for arrival in wanted.values():
                arrival.set_result(None)

    async def _bring_missing(self, call: HubCall, sha: str, name: str, paths: list[str]) -> None:
        failure = await self._extended(call, sha, name, paths)
        if failure is not None and len(paths) == 1:
            self._note_failed(name, paths, failure)
        elif failure is not None:  # one of them may be why
            for path in paths:
                await self._bring_missing(call, sha, name, [path])

    def _note_failed(self, name: str, paths: Iterable[str], error: BdnError) -> None:
        now = time.monotonic()
        self._failed = {key: known for key, known in self._failed.items() if known[1] > now}
        self._failed.update(((name, path), (error, now + _FAILED_SECONDS)) for path in paths)

    async def _extended(self, call: HubCall, sha: str, name: str, paths: list[str]) -> BdnError | None:
        """Mirror these files with those that clients asked for before, as one manifest. Returns why it failed."""
        before = [row for row in await self._rows(call, sha) if row.mount_location == _MOUNT]
        known = before[0].request.get("allow_patterns") if before else None
        allow = sorted({*map(_literal, paths), *(known or ())})
        if len(allow) > COUNT_LIMIT:
            allow = sorted(map(_literal, paths))
        mirror = await self._mirrored(call, sha, name, allow)
        if mirror.error is not None:
            return ReportedError(mirror.error)
        await self._give_up(*(row for row in before[1:] if set(row.request.get("allow_patterns") or ()) <= set(allow)))
        await self.requests.trees.files(replace(call.repository, revision=sha), self.rules.organisation, is_held=False)
        return None

    async def _mirrored(self, call: HubCall, sha: str, name: str, allow: list[str]) -> Mirror:
        """Mirror files of the commit, under the name of the branch by which clients know it, until it is over."""
        key, secret = (str(call.repository), sha), self.rules.secret
        auth = Auth(AuthMethod.CUSTOM_SECRET, {"auth_secret_name": secret}) if secret else None
        revision = self._named.get(key, sha)
        uri = replace(call.repository, revision=revision)
        wanted = WeightsSource(uri, _MOUNT, Patterns(tuple(allow)), auth)
        mirror = await self.requests.request([wanted], self.rules.organisation)
        self._running[name] = mirror.id
        try:
            while mirror.status not in TERMINAL:
                mirror = await self.requests.wait(mirror.id, self.rules.organisation, LONGEST_WAIT_SECONDS)
        finally:
            del self._running[name]
        if mirror.error is None and mirror.sources[0].resolved_revision != sha:
            self._named.pop(key, None)  # the branch has moved; this commit is known by its own name from now on
            return await self._mirrored(call, sha, name, allow)
        return mirror

    async def _give_up(self, *replaced: MirrorSourceRow) -> None:
        """Manifests that a later one contains. The newest of them stays: nodes may be reading it."""
        database, organisation = self.requests.database, self.rules.organisation
        names, now = sorted({str(row.manifest) for row in replaced}), database.now()
        facts = {"eviction": _REPLACED, "restorable_until": None}
        async with database.write() as session:
            await manifests.lock(session, names)
            places = {(row.mirror_id, row.position) for row in replaced}
            spared = await mirrors.named_beside(session, organisation, names, places)
            gone = [name for name in names if name not in spared]
            await mirrors.give_up(session, organisation, gone, _REPLACED, now)
            told = (events.event_of("tombstoned", facts, name, organisation=organisation) for name in gone)
            await events.record(session, now, told)


def _selects(row: MirrorSourceRow, path: str) -> bool:
    if row.mount_location == _MOUNT:  # of up to a thousand patterns
        return _literal(path) in row.request.get("allow_patterns", ())
    patterns = WeightsSourceBody.model_validate(row.request).to_core().patterns
    return bool(select([path], patterns).paths)


def _literal(path: str) -> str:
    """A pattern that selects this path alone, whatever characters it has."""
    return re.sub(r"([\[*?])", r"[\1]", path)


# --- answers, as the hub gives them ---


def _document(body: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(body)
    except ValueError:
        return None


def _without_xet(found: Any) -> Any:  # noqa: ANN401 - JSON
    """Without names that lead clients to the hub's xet storage."""
    if isinstance(found, dict):
        return {name: _without_xet(value) for name, value in found.items() if name != "xetHash"}
    return [_without_xet(one) for one in found] if isinstance(found, list) else found


def _answer_of(reply: HubReply) -> HubAnswer:
    headers, document = dict(reply.headers), _document(reply.body)
    body = reply.body.decode("utf-8", "replace") if document is None else json.dumps(_without_xet(document))
    if reply.next_page is not None:
        headers["link"] = f'<{reply.next_page}>; rel="next"'
    if reply.moved_to is not None:
        headers["location"] = reply.moved_to
    return HubAnswer(status=reply.status, headers=headers, body=body)


def _commit_headers(commit: _Commit) -> dict[str, str]:
    stale = "bdn; the hub does not answer: this is what BDN holds, as the hub said it last"
    return {"x-repo-commit": commit.sha, **({"x-hf-warning": stale} if commit.is_stale else {})}


def _json_answer(document: object, commit: _Commit) -> HubAnswer:
    return HubAnswer(headers={**_JSON, **_commit_headers(commit)}, body=json.dumps(document))


def _refusal(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> HubAnswer:
    message = message.encode("latin-1", "replace").decode("latin-1").replace("\n", " ")
    coded = {"x-error-code": code} if code else {}
    said = {**_JSON, **(headers or {}), **coded, "x-error-message": message}
    return HubAnswer(status=status, headers=said, body=json.dumps({"error": message}))


def _failure(error: BdnError) -> HubAnswer:
    """Why a file was not copied. Never 401, which clients take for "no such repository"."""
    status = status_of(error)
    if isinstance(error, UpstreamUnavailableError) or error.code == UpstreamUnavailableError.code:
        status = 504
    return _refusal(403 if status == 401 else status, "", str(error))


def _not_there(commit: _Commit) -> HubAnswer:
    return _refusal(404, "EntryNotFound", "Entry not found", _commit_headers(commit))


def _file_headers(file: Mapping[str, Any], commit: _Commit) -> dict[str, str]:
    lfs = file.get("lfs")
    etag = lfs["oid"] if isinstance(lfs, dict) else file["oid"]
    headers = {"etag": f'"{etag}"', "accept-ranges": "bytes", "content-length": str(int(file["size"]))}
    return {**_commit_headers(commit), **headers, "content-type": "application/octet-stream"}


def _file_entry(file: ListedFile) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": file.path, "size": file.size, "oid": file.git_name or ""}
    if file.checksum_kind == ChecksumKind.SHA256:
        entry["lfs"] = {"oid": file.checksum, "size": file.size, "pointerSize": len(_pointer(file))}
    return entry


def _pointer(file: ListedFile) -> str:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{file.checksum}\nsize {file.size}\n"


def _folder_entry(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}


def _entries(tree: Mapping[str, ListedFile], folder: str, *, is_recursive: bool) -> list[dict[str, Any]]:
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
            found[path] = _file_entry(file)
    return [found[path] for path in sorted(found)]


def _paths_of(request: HubRequest) -> list[str]:
    if "json" in request.content_type:
        found = _document(request.body.encode())
        paths = found.get("paths", []) if isinstance(found, dict) else []
        return [str(path) for path in (paths if isinstance(paths, list) else [paths])]
    return parse_qs(request.body).get("paths", [])


def _paths_info(tree: Mapping[str, ListedFile], paths: Iterable[str]) -> Iterator[dict[str, Any]]:
    for path in paths:
        name = path.strip("/")
        if name in tree:
            yield _file_entry(tree[name])
        elif any(other.startswith(f"{name}/") for other in tree):
            yield _folder_entry(name)
