"""From what an operator names to manifests that his organisation mirrored, whether or not they are still held."""

from __future__ import annotations

from bdn.core.digest import Digest
from bdn.core.errors import InvalidRequestError, NotFoundError
from bdn.mirror.db import mirrors
from bdn.mirror.db.database import ReadSession


async def of_manifest(session: ReadSession, organisation: str, text: str) -> list[str]:
    """The manifest itself, as hex; ``NotFoundError`` when it was never this organisation's."""
    try:
        digest = Digest.parse(text)
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
