"""Small changes that make a file of ``bdn/mirror`` wrong: file, breakage, old text, new text, and where it should be noticed."""

from __future__ import annotations

from typing import Final, NamedTuple

_INTEGRATION: Final = "tests/integration/test_mirror_"


class Breakage(NamedTuple):
    file: str
    breakage: str
    old: str
    new: str
    tests: str


def _at(name: str) -> str:
    """``unit/flights`` and ``fault/killed`` are folders' tests, everything else is an integration test."""
    folder, slash, rest = name.partition("/")
    if not slash:
        return f"{_INTEGRATION}{name}.py"
    return f"tests/unit/mirror/test_{rest}.py" if folder == "unit" else f"tests/fault/test_mirror_{rest}.py"


_ROWS: Final = [
    # one file at a time, once
    ("flights.py", "forgetting takes away work that is under way", "if flight is not None and flight.done():",
     "if flight is not None:", "unit/flights"),
    ("flights.py", "a waiter fails with its leader", "if not flight.cancelled():", "if True:", "unit/flights"),
    ("flights.py", "what others bring after a survey is not noticed", "if follower not in own or len(own) > 1:",
     "if False:", "requests"),
    ("gathering.py", "a file that somebody else brought is not looked for", "if held:\n                return held",
     "if False:\n                return held", "unit/gathering"),
    ("gathering.py", "what somebody else brought is not counted", "self.progress.reused(self.position, missing)",
     "self.progress.reused(self.position, 0)", "unit/gathering"),
    ("gathering.py", "chunks of a wrong file are kept", "except (ChecksumMismatchError, SourceChangedError):",
     "except ZeroDivisionError:", "errors"),
    ("gathering.py", "a chunk that the store lost is never missed", "except NotFoundError as error:",
     "except ZeroDivisionError as error:", "races"),
    # progress and claims
    ("progress.py", "a batch that could not be written is lost", "self._chunks = chunks + self._chunks", "pass",
     "unit/progress"),
    ("progress.py", "counters that could not be written are lost", "counters.changed = True\n                raise",
     "counters.changed = False\n                raise", "unit/progress"),
    ("progress.py", "two flushes overtake each other", "_flushing: asyncio.Lock = field(default_factory=asyncio.Lock)",
     "_flushing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(9))", "unit/progress"),
    ("progress.py", "a worker writes without its claim", 'if status != "SYNCING" and not (canceled_too and status is not None):',
     "if False:", "unit/progress"),
    ("progress.py", "a canceled mirror is published", 'if status != "SYNCING" and not (canceled_too and status is not None):',
     "if status is None:", "races"),
    ("worker.py", "claims are not given back at the end", "await mirrors.release_claims(session, self.name)", "pass",
     "fault/killed"),
    ("worker.py", "a bug ends the worker", "        except Exception:\n", "        except ZeroDivisionError:\n", "races"),
    ("worker.py", "two mirrors of one worker are one claimant", 'f"{self.name}:{next(self._claims)}"', 'f"{self.name}:0"',
     "postgres"),
    ("repository/mirrors.py", "a claim that ran out is never taken over", "MirrorRow.claim_expires_at < now)",
     "MirrorRow.claim_expires_at < 0)", "postgres"),
    ("repository/mirrors.py", "a running claim is taken over", "MirrorRow.claim_expires_at < now)",
     "MirrorRow.claim_expires_at > now)", "postgres"),
    ("repository/mirrors.py", "a canceled mirror's worker lets go at once", 'if status != "CANCELED":', "if True:", "evictions"),
    ("repository/mirrors.py", "a copy begins while chunks are deleted", ", ~exists().where(EvictionRow.doomed.is_not(None)))",
     ")", "races"),
    ("repository/mirrors.py", "a terminal state can change", ".where(MirrorRow.id == mirror_id, MirrorRow.status.in_(RUNNING)).values",
     ".where(MirrorRow.id == mirror_id).values", "watching"),
    ("repository/mirrors.py", "an eviction overlooks who claims meanwhile",
     'if session.get_bind().dialect.name == "postgresql":', "if False:", "postgres"),
    ("repository/mirrors.py", "mirrors of one moment fall between pages", "or_(MirrorRow.created_at < moment, older)",
     "MirrorRow.created_at < moment", "watching"),
    ("repository/mirrors.py", "every organisation sees every mirror",
     "return found if found is not None and found[0].organisation == organisation else None", "return found", "access"),
    ("database.py", "two processes evict at once", "            if self._is_sqlite:\n                yield",
     "            if True:\n                yield", "postgres"),
    ("database.py", "a database that is away is a bug", "return isinstance(error, (OSError, PoolTimeoutError))", "return False",
     "database"),
    # resolve, list, select, diff, copy, publish
    ("selecting.py", "one file too many is accepted", "if len(listed) > self.limit_files:",
     "if len(listed) > self.limit_files + 1:", "errors"),
    ("selecting.py", "a path may be file and folder", "check_tree(file.path for file in files)", "pass", "errors"),
    ("survey.py", "half-copied files count as nothing", "return file.size - self.stored.get(file.identity.key, 0)",
     "return file.size", "watching"),
    ("survey.py", "a revision is resolved anew after a restart", "if revision is not None and isinstance", "if False and isinstance",
     "races"),
    ("copier.py", "checksums of large files are not compared", "if file.checksum is not None and len(chunks) != 1:", "if False:",
     "errors"),
    ("copier.py", "checksums of small files are not compared",
     "if located.file.checksum is not None and request.range.size == located.file.size:", "if False:", "errors"),
    ("copier.py", "an expired address is not renewed", "location = await located.location(refused=location)",
     "location = await located.location()", "races"),
    ("copier.py", "stored chunks are fetched again", "chunks = dict(stored)", "chunks: dict[int, Digest] = {}", "fault/killed"),
    ("patience.py", "nothing is asked again", "failures += 1", "failures += 6", "errors"),
    ("patience.py", "Retry-After is not honoured", "await self.pause(delay)", "await self.pause(0)", "errors"),
    ("repository/contents.py", "what is gone is published", "if lost := await", "if False and await", "races"),
    ("repository/contents.py", "mirroring again is not a use", "await touch(session, [manifest.digest.hex], now)", "pass",
     "evictions"),
    ("requests.py", "a plan counts equal files twice", "for file in survey.diff.missing if file.identity.key not in counted)",
     "for file in survey.diff.missing)", "watching"),
    ("views.py", "a grant promises what was evicted", "if not all(source.manifest in held for source in sources):",
     "if not sources:", "access"),
    ("secrets.py", "a name may leave the directory", "if not is_secret_name(name):", "if False:", "unit/secrets"),
    # access
    ("access.py", "a grant reads every manifest of its organisation", "if not grant.allows(manifest):", "if False:", "access"),
    ("access.py", "a grant reads every chunk",
     "if chunk.to_bytes() in await self._objects_of(mount.manifest, grant.organisation):", "if mount:", "access"),
    ("access.py", "what one organisation may read another may, too", "key = (manifest.hex, organisation)",
     'key = (manifest.hex, "")', "slabs"),
    ("access.py", "a slab that came late is not found",
     "if await layouts.opens(session, mount.manifest.hex, grant.organisation, chunk.hex):", "if False:", "slabs"),
    ("repository/layouts.py", "a layout leads into another organisation's slab",
     'ContentRow.chunks == b"", is_of(scope_of(organisation)))', 'ContentRow.chunks == b"")', "slabs"),
    ("repository/layouts.py", "a grant opens another organisation's slab",
     "SlabSliceRow.content.in_(named), is_of(scope_of(organisation)))", "SlabSliceRow.content.in_(named))", "slabs"),
    ("repository/layouts.py", "a grant opens every slab of its organisation",
     ".where(SlabSliceRow.slab == digest, ManifestContentRow.manifest == manifest, is_of(scope_of(organisation)))",
     ".where(SlabSliceRow.slab == digest, is_of(scope_of(organisation)))", "packing"),
    ("repository/layouts.py", "what lies in another organisation's slab is published",
     "exists().where(SlabSliceRow.content == ContentRow.digest, is_of(scope_of(organisation)))",
     "exists().where(SlabSliceRow.content == ContentRow.digest)", "packing"),
    ("repository/layouts.py", "a file's slab is any slab", "(-used[slab], slab) < (-used[rival[0]], rival[0])",
     "slab < rival[0]", "packing"),
    ("api_contents.py", "a packed file begins where its slab begins", "opened.offset + start", "start", "slabs"),
    ("shelf.py", "a packed file begins where its slab begins on the data plane", "place.offset, size)", "0, size)", "slabs"),
    ("layout_document.py", "every file lies at the beginning", '"offset":{one.offset}', '"offset":0', "unit/layout_document"),
    ("access.py", "what was published for others is readable",
     "if not await mirrors.may_read(session, organisation, manifest.hex):", "if False:", "access"),
    ("api_mirrors.py", "events of nothing are an empty stream", "dependencies=[Depends(is_there)],", "", "errors"),
    ("keys.py", "the signing key is readable by all", "mode=0o600", "mode=0o644", "access"),
    ("app.py", "any address is good without authentication",
     'if settings.auth == "off" and settings.host not in ("127.0.0.1", "::1", "localhost"):', "if False:", "access"),
    ("app.py", "callers use the process's own credentials", 'ambient_credentials=settings.auth == "off"',
     "ambient_credentials=True", "access"),
    ("app.py", "two mirrors share a data directory", "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", "fault/serve"),
    ("app.py", "stopping waits for a silent upstream", "stack.callback(connections.close)", "stack.callback(bool)",
     "fault/killed"),
    ("app.py", "a crash between rows and chunks is not made good", "await stack.enter_async_context(store_eviction.sweeping())", "pass", "evictions"),
    # evictions and agents
    ("repository/removal.py", "shared chunks are deleted", "return chunks - await _in_use(session, chunks)", "return chunks",
     "evictions"),
    ("repository/removal.py", "a slab that is somebody's file as well is deleted",
     "used.update(bytes.fromhex(digest) for digest in (await session.execute(slabs)).scalars())", "pass", "packing"),
    ("eviction_weights.py", "shared contents are freed", "if not names[content]:", "if True:", "evictions"),
    ("eviction_weights.py", "slabs that are asked about are gone", "self._needs.going(unnamed)", "self._needs.take(unnamed)",
     "packing"),
    ("store_eviction.py", "a dry run deletes", "if not command.dry_run and plan.victims:", "if plan.victims:", "evictions"),
    ("store_eviction.py", "a forced eviction robs a running mirror",
     "refused = bool(busy) or (bool(held_by) and not command.force)", "refused = bool(held_by) and not command.force",
     "evictions"),
    ("store_eviction.py", "leases are ignored", "or holders.get(digest, [])", "or []", "agents"),
    ("repository/removal.py", "half-copied files lose their chunks",
     "used.update(bytes.fromhex(digest) for digest in (await session.execute(query)).scalars())", "pass", "evictions"),
    ("evictions.py", "a late agent still evicts", "return now - row.created_at > ANSWER_SECONDS", "return False", "agents"),
    ("evictions.py", "a report counts twice", "if row is None or name not in row.pending:", "if row is None:", "agents"),
    ("membership.py", "the epoch grows with every heartbeat", "if cluster.members != names:", "if True:", "agents"),
    ("repository/agents.py", "of two agents that report at once one is overlooked", ", with_for_update=True)", ")", "postgres"),
]  # fmt: skip

BREAKAGES: Final = [Breakage(file, breakage, old, new, _at(tests)) for file, breakage, old, new, tests in _ROWS]
