"""Archives of jobs: uploads of one object each, which become ``bt://<project id>@<job id>/.archive``.

An upload is a push without a name (``bdn.mirror.jobs.pushes``). Each part is a chunk, and its ETag the chunk's digest,
so completing an upload lists the chunks of its object, and nothing else. Until a job takes it, the object is in the row
of its push, as the key ``object`` of the request.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from bdn.core.chunk import CHUNK_SIZE, Digest, file_digest
from bdn.core.errors import (
    ChunksMissingError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
    QuotaExceededError,
    SourceNotFoundError,
)
from bdn.core.manifest import PlacedFile, empty_file, is_small, large_file, slab_layouts
from bdn.core.source.uri import CheckpointUri
from bdn.core.training.checkpoints import ARCHIVE
from bdn.mirror.db import checkpoints, chunks, manifests, mirrors, projects
from bdn.mirror.db.checkpoints import PushScope, Version
from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import MirrorRow, MirrorSourceRow
from bdn.mirror.jobs.pushes import UPLOAD_BYTES, Commit, Pushes, is_upload, new_push_id
from bdn.wire.grants import UploadGrant

ARCHIVE_FILE: Final = "archive.tgz"  # the only file of an archive
GRANT_SECONDS: Final = 3600.0
PART_RULE: Final = f"each part has 8 MiB, the last one at most 8 MiB: set multipart_chunksize to {CHUNK_SIZE}"
_UNKNOWN: Final = "does not exist, or is not yours"
_MOST_PARTS: Final = UPLOAD_BYTES // CHUNK_SIZE


class UploadRefusedError(InvalidRequestError):
    template = "the upload {key!r} {problem}"
    key: str


@dataclass(frozen=True, slots=True)
class Upload:
    """The key of one object, and the signed grant to upload it."""

    key: str
    token: str = field(repr=False)


@dataclass(frozen=True)
class Archives:
    database: Database
    pushes: Pushes

    # --- uploads ---

    async def begin(self, organisation: str, team: str | None) -> Upload:
        key = await self.pushes.begin_upload(organisation, team)
        grant = UploadGrant(organisation, key, self.database.now() + GRANT_SECONDS)
        return Upload(key, self.pushes.requests.signer.sign(grant))

    async def check(self, key: str) -> None:
        """Raise ``NotFoundError``, or ``QuotaExceededError``, for an upload that has ended."""
        await self.pushes.get(key, None)

    async def complete(self, key: str, parts: Sequence[Digest]) -> Digest:
        """Record the object of these parts; the last call counts. Returns the object's digest.

        Raises:
            InvalidRequestError: a part was not uploaded, or has another size than ``PART_RULE`` says.
            LimitExceededError: too many parts.
            NotFoundError: the upload has ended.
        """
        if len(parts) > _MOST_PARTS:
            raise LimitExceededError("parts of the upload", len(parts), _MOST_PARTS)
        push = await self.pushes.get(key, None)
        async with self.database.write() as session:
            await self.pushes.renew(session, push)
            sizes = await chunks.of(session, chunks.stored, parts, [push.writer.set_id])
            _check_sizes(parts, sizes)
            size = sum(sizes[part] for part in parts)
            found = {"size": size, "chunks": [str(part) for part in parts]}
            (source,) = (await mirrors.get(session, key, None)).sources
            await mirrors.update_source(session, key, 0, request={**source.request, "object": found})
        return file_digest(size, parts)

    async def abort(self, key: str) -> None:
        """Cancel the push of an upload. Raises ``NotFoundError`` if the upload has ended."""
        await self.pushes.cancel(await self.pushes.get(key, None))

    # --- archives of jobs ---

    async def commit(self, organisation: str, team: str | None, key: str, project_id: str, job_id: str) -> str:
        """Make the upload the archive of this job. Returns the archive's source; a repeated commit returns it again.

        Raises:
            UploadRefusedError: the key is unknown or foreign, was used by another job, or has expired; its upload is
                not complete, or exceeds the organisation's quota.
            NotFoundError: the project does not exist, or is not the caller's.
        """
        uri = CheckpointUri(project_id, job_id, ARCHIVE)
        async with self.database.read() as session:
            project = await projects.find(session, organisation, project_id, team)
            try:
                state = await mirrors.get(session, key, organisation, team)
            except NotFoundError:
                raise UploadRefusedError(_UNKNOWN, key) from None
        if project is None or project.id != project_id:
            raise NotFoundError(f"project {project_id}")
        if state.row.status == "READY" and [source.source for source in state.sources] == [str(uri)]:
            return str(uri)
        file = _uploaded(state.row, state.sources)
        try:
            push = await self.pushes.get(key, None)
            await self.pushes.publish(push, Commit(PushScope(organisation, project.team), uri, [file]))
        except (NotFoundError, ChunksMissingError) as error:  # another caller or a scrub was faster
            raise UploadRefusedError(f"cannot be used any more ({error}): upload the archive again", key) from error
        except QuotaExceededError as error:
            raise UploadRefusedError(f"has no room: {error}", key) from error
        return str(uri)

    async def manifest(self, organisation: str, team: str | None, project_id: str, job_id: str) -> Digest | None:
        """The manifest of a job's archive; None if the job has none."""
        uri = CheckpointUri(project_id, job_id, ARCHIVE)
        async with self.database.read() as session:
            with suppress(SourceNotFoundError):
                return Digest((await checkpoints.found(session, organisation, uri, team)).row.manifest)
        return None

    async def reuse(self, project_id: str, from_job: str, to_job: str) -> str:
        """Make the archive of one job the archive of another one, too. Returns its source.

        No byte moves. Both archives can be deleted alone.

        Raises:
            NotFoundError: the job has no archive, or it was evicted.
        """
        source = str(uri := CheckpointUri(project_id, to_job, ARCHIVE))
        async with self.database.write() as session:
            known = await checkpoints.archive(session, project_id, from_job)
            if known is None or not await manifests.lock(session, [known[0].manifest]):
                raise NotFoundError(f"the archive of job {from_job}")
            row, project = known
            push_id, now, key = new_push_id(), self.database.now(), mirrors.push_key(source, project.team)
            request = {"source": source, "mount_location": mirrors.PUSH_MOUNT}
            await mirrors.insert(session, push_id, project.organisation, key, [request], now=now, team=project.team)
            version: Version = {
                "mirror": push_id,
                "manifest": row.manifest,
                "created_at": now,
                "committed_at": now,
                "files_total": row.files_total,
                "bytes_total": row.bytes_total,
                "is_loadable": row.is_loadable,
                "details": row.details,
            }
            await self.pushes.record(session, PushScope(project.organisation, project.team), uri, version)
        return source


def _check_sizes(parts: Sequence[Digest], sizes: Mapping[Digest, int]) -> None:
    for number, part in enumerate(parts, start=1):
        if part not in sizes:
            raise InvalidRequestError(f"part {number} of {len(parts)} was not uploaded with ETag {part}")
        if sizes[part] != CHUNK_SIZE and number < len(parts):
            raise InvalidRequestError(f"part {number} of {len(parts)} has {sizes[part]} bytes: {PART_RULE}")


def _uploaded(row: MirrorRow, sources: Sequence[MirrorSourceRow]) -> PlacedFile:
    """The completed object of an upload, as a file. Raises ``UploadRefusedError``."""
    (source,) = sources if len(sources) == 1 else (None,)
    if source is None or not (is_upload(source.source) or source.source.endswith(f"/{ARCHIVE}")):
        raise UploadRefusedError(_UNKNOWN, row.id)
    if row.status == "READY":
        raise UploadRefusedError("was used by another job: upload the archive again", row.id)
    if row.status != "SYNCING":
        raise UploadRefusedError("has ended: upload the archive again", row.id)
    if (found := source.request.get("object")) is None:
        raise UploadRefusedError("is not complete", row.id)
    parts = tuple(map(Digest.parse, found["chunks"]))
    if is_small(found["size"]):
        (file,) = slab_layouts([(ARCHIVE_FILE, found["size"], parts[0])], parts[0], found["size"])
        return file
    return large_file(ARCHIVE_FILE, found["size"], parts) if parts else empty_file(ARCHIVE_FILE)
