"""Answers hub clients: from the hub, once for many callers, or from what the mirror holds.

A caller's token is sent to the hub, and kept nowhere: what callers share is found by its keyed digest. Files are copied
with the credentials of one organisation, which the operator names; the caller's token only shows that its owner may read
the repository.
"""

import asyncio
import fnmatch
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Self
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from bdn.core.errors import BdnError, NotFoundError
from bdn.core.listing import ListedFile
from bdn.core.source.upstream import Identity
from bdn.core.source.uri import COMMIT
from bdn.core.store import PUBLIC
from bdn.mirror.db import mirrors
from bdn.mirror.db.waiting import SharedReads
from bdn.mirror.hub.answers import (
    HubRefusalError,
    ResolvedCommit,
    answer_of,
    entries_below,
    failure,
    file_entry,
    file_headers,
    json_answer,
    not_there,
    parsed,
    paths_info,
    paths_of,
    refusal,
)
from bdn.mirror.hub.calls import HubCall
from bdn.mirror.hub.copies import GatewayCopies, WantedFile
from bdn.mirror.ingest.requests import MirrorRequests
from bdn.mirror.settings import MirrorSettings
from bdn.sources.huggingface.forwarding import HubForwarder, HubReply
from bdn.wire.hub_schema import HubAnswer, HubRequest

_SHARED_SECONDS: Final = 30.0  # of an answer of the hub, for all callers with the same token
_SILENT_SECONDS: Final = 10.0
_SHARED_BYTES: Final = 64 * 1024**2  # beyond these, only concurrent callers share answers
_PAGE: Final = 1000  # entries of a tree, as at the hub
_UNANSWERED: Final = "the hub does not answer, and BDN does not hold this"


class _HubSilentError(Exception):
    """The hub does not answer, and nothing that the mirror holds may be given instead."""


@dataclass(frozen=True)
class GatewayRules:
    """``organisation`` "": the mirror answers no gateway. ``largest`` bytes of a file; None means no limit."""

    organisation: str
    allow: tuple[str, ...]
    deny: tuple[str, ...]
    largest: int | None

    @classmethod
    def of(cls, settings: MirrorSettings) -> Self:
        allow, deny = (
            tuple(globs.replace(",", " ").split()) for globs in (settings.gateway_allow, settings.gateway_deny)
        )
        return cls(settings.gateway_organisation, allow, deny, settings.gateway_limit)

    def check(self, repo_id: str) -> None:
        is_allowed, is_denied = (
            any(fnmatch.fnmatchcase(repo_id, glob) for glob in globs) for globs in (self.allow, self.deny)
        )
        if is_denied or not is_allowed:
            raise HubRefusalError(refusal(403, "", f"the operator of this gateway does not allow {repo_id}"))

    def check_size(self, path: str, size: int) -> None:
        if self.largest is not None and size > self.largest:
            said = f"{path} has {size} bytes, and BDN_GATEWAY_LIMIT of this gateway's mirror is {self.largest}"
            raise HubRefusalError(refusal(403, "", said))


@dataclass
class HubGateway:
    """One per process of the mirror.

    ``on_bypass`` is called when a client gets a token for the hub's xet storage: it listed the commit at the hub itself.
    """

    rules: GatewayRules
    hub: HubForwarder
    requests: MirrorRequests
    copies: GatewayCopies
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
                return refusal(405, "", "this gateway only reads")
            if call is None:
                return await self._about_no_repository(request, path)
            self.rules.check(call.repo_id)
            return await self._about(call, request, wait_seconds)
        except HubRefusalError as refused:
            return refused.answer
        except _HubSilentError:
            return refusal(504, "", _UNANSWERED)
        except BdnError as error:
            return failure(error)

    async def _about_no_repository(self, request: HubRequest, path: str) -> HubAnswer:
        if path == "/api/whoami-v2":
            return answer_of(await self._ask(request))
        return refusal(404, "", "Not found")

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
                return await self._refs(call) if reply is None else answer_of(reply)
            case "xet-read-token":
                self.on_bypass()
                return await self._xet_token(request)
            case _:
                return answer_of(await self._ask(request))

    # --- the hub ---

    async def _ask(self, request: HubRequest) -> HubReply:
        reply = await self._share(request)
        if reply is None:
            raise _HubSilentError
        return reply

    async def _xet_token(self, request: HubRequest) -> HubAnswer:
        """A credential, so callers do not share it, and no part of it is kept."""
        reply = await self.hub.ask(request.method, request.target, request.authorization, is_xet=True)
        if reply is None or reply.is_outage:
            raise _HubSilentError
        return HubAnswer(status=reply.status, headers=dict(reply.headers), body=reply.body.decode("utf-8", "replace"))

    async def _share(self, request: HubRequest) -> HubReply | None:
        """The hub's answer, requested once for callers with the same token. None: it cannot answer this now."""
        token = hmac.digest(self._key, (request.authorization or "").encode(), "sha256").hex()
        key = (request.method, request.target, request.content_type, request.body, token)
        reads = self._replies if self._shared_bytes < _SHARED_BYTES else self._concurrent
        read = reads.of(key, partial(self._requested, request))
        reply = await read.get()
        if reply is None or reply.is_outage or reply.status == 429:
            read.forget()  # the hub may answer the next request
        return None if reply is None or reply.is_outage else reply

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

    async def _commit(self, call: HubCall, request: HubRequest) -> ResolvedCommit:
        """The commit of the revision, and whether the caller may read its files."""
        fields = "" if call.kind in ("space", "kernel") else "?expand=sha&expand=private&expand=gated"
        target = f"{call.api}/revision/{quote(call.revision, safe='')}{fields}"
        question = HubRequest(method="GET", target=target, authorization=request.authorization)
        reply = await self._share(question)
        if reply is None:
            return await self._last_commit(call)
        if reply.moved_to is not None and (there := HubCall.of(urlsplit(reply.moved_to).path)) is not None:
            raise HubRefusalError(HubAnswer(status=307, headers={"location": call.moved(request.target, there)}))
        if reply.status != 200:
            raise HubRefusalError(answer_of(reply))
        described = parsed(reply.body)
        sha = str(described.get("sha") if isinstance(described, dict) else "")
        if not COMMIT.fullmatch(sha):
            raise _HubSilentError
        self._remember(call, sha)
        if not described.get("gated"):
            return ResolvedCommit(sha)
        checked = await self._ask(
            HubRequest(method="GET", target=f"{call.api}/auth-check", authorization=request.authorization)
        )
        return ResolvedCommit(sha, None if checked.status == 200 else answer_of(checked))

    def _remember(self, call: HubCall, sha: str) -> None:
        if sha != call.revision:
            self.copies.remember(call.repository, sha, call.revision)

    # --- while the hub is silent: public repositories as they were last ---

    async def _last_commit(self, call: HubCall) -> ResolvedCommit:
        sha = call.revision if COMMIT.fullmatch(call.revision) else (await self._revisions(call)).get(call.revision)
        tree = None if sha is None else await self._tree(call, sha)
        if sha is None or not tree or not self._is_public(call, next(iter(tree.values()))):
            raise _HubSilentError
        return ResolvedCommit(sha, is_stale=True)

    async def _revisions(self, call: HubCall) -> dict[str, str]:
        """Branches and tags with the commits that they named last."""
        async with self.requests.database.read() as session:
            found = await mirrors.revisions(session, self.rules.organisation, str(call.repository))
        default = found.pop("", None)
        return found if default is None else {"main": default, **found}

    def _is_public(self, call: HubCall, file: ListedFile) -> bool:
        """Whether the repository was public when it was listed: the identity of its files says so."""
        return file.key == Identity.of(PUBLIC, *self._place(call, file_entry(file))).key

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
            described = parsed(reply.body)
            if reply.status == 200 and isinstance(described, dict) and COMMIT.fullmatch(str(described.get("sha"))):
                self._remember(call, str(described["sha"]))
            return answer_of(reply)
        commit = await self._last_commit(call)
        tree = await self._tree(call, commit.sha) or {}
        return json_answer(
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
        return json_answer({"branches": branches, "converts": [], "tags": [], "pullRequests": []}, commit)

    async def _listing(self, call: HubCall, request: HubRequest) -> HubAnswer:
        commit = await self._commit(call, request)
        tree = await self._tree(call, commit.sha)
        if tree is None:
            return answer_of(await self._ask(request))
        query = parse_qs(urlsplit(request.target).query)
        if call.operation == "paths-info":
            return json_answer(list(paths_info(tree, paths_of(request))), commit)
        is_recursive = query.get("recursive", [""])[0].lower() == "true"
        entries = await asyncio.to_thread(
            entries_below, tree, call.path, is_recursive=is_recursive
        )  # a million files take a second
        if call.path and not entries:
            return not_there(commit)
        start = int(query["cursor"][0]) if query.get("cursor", [""])[0].isdecimal() else 0
        answer = json_answer(entries[start : start + _PAGE], commit)
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
        answer, size = HubAnswer(headers=file_headers(file, commit)), int(file["size"])
        if request.method == "GET":
            self.rules.check_size(call.path, size)
            wanted = WantedFile(call.repository, commit.sha, call.path)
            row = await self.copies.find(wanted)
            if row is None and commit.is_stale:
                raise _HubSilentError
            if row is None:
                answer.eta_seconds = await self.copies.copy(wanted, wait_seconds)
                row = await self.copies.find(wanted)
            answer.is_pending = row is None
            if row is not None:
                answer.content = await self.copies.content(row, call.path, size)
            if request.beginning_at is not None:
                answer.beginning = await self.copies.beginning(*self._place(call, file), start=request.beginning_at)
        return answer

    def _place(self, call: HubCall, file: Mapping[str, Any]) -> tuple[str, ...]:
        """The parts of the file's identity after its scope."""
        checksum = lfs["oid"] if isinstance(lfs := file.get("lfs"), dict) else file["oid"]
        return "hf", self.hub.endpoint, call.kind, call.repo_id, str(checksum), str(file["size"])

    async def _entry(self, call: HubCall, commit: ResolvedCommit, request: HubRequest) -> Mapping[str, Any]:
        """What the listing or the hub says of one file."""
        tree = await self._tree(call, commit.sha)
        if tree is not None:
            if (file := tree.get(call.path)) is None:
                raise HubRefusalError(not_there(commit))
            return file_entry(file)
        question = HubRequest(
            method="POST",
            target=f"{call.api}/paths-info/{commit.sha}",
            authorization=request.authorization,
            content_type="application/x-www-form-urlencoded",
            body=urlencode({"paths": call.path, "expand": "false"}),
        )
        reply = await self._ask(question)
        listed = parsed(reply.body) if reply.status == 200 else []
        for one in listed if isinstance(listed, list) else []:
            if one.get("type") == "file" and one.get("path") == call.path:
                found: Mapping[str, Any] = one
                return found
        raise HubRefusalError(not_there(commit))
