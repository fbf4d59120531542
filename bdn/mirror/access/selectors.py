"""From what an operator names to manifests that the organisation mirrored, whether or not they are still held."""

from __future__ import annotations

from bdn.core.digest import Digest
from bdn.core.errors import InvalidRequestError, NotFoundError
from bdn.mirror.db import mirrors
from bdn.mirror.db.database import ReadSession


async def named(session: ReadSession, organisation: str, manifest: str | None, source: str | None) -> list[str]:
    """The manifest, as hex; else everything that the source was mirrored as, all its revisions unless it names one.

    Raises:
        InvalidRequestError: the manifest is no digest.
        NotFoundError: it was never this organisation's.
    """
    if manifest is None:
        return await of_source(session, organisation, source or "")
    try:
        digest = Digest.parse(manifest)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    if not await mirrors.sources_by_manifest(session, organisation, [digest.hex]):
        raise NotFoundError(f"manifest {digest}")
    return [digest.hex]


async def of_source(session: ReadSession, organisation: str, source: str) -> list[str]:
    """Everything that a source was mirrored as, as hex; all its revisions unless it names one."""
    found = await mirrors.manifests_of(session, organisation, source.rstrip("/"))
    found = found or await mirrors.manifests_of(session, organisation, source)
    if not found:
        raise NotFoundError(f"a mirrored source {source}")
    return found
