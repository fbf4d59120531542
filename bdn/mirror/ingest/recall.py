"""A commit never changes: what was published for it once is published for it again, without listing it again.

Unless some of it is damaged: then it is looked at like a new one, and what is damaged is fetched.

Only sources with revisions can be recalled; a bucket has to be listed to know that it is what it was. Access is not
recalled: resolving asked the upstream for it, with the credentials of this request.
"""

from __future__ import annotations

from dataclasses import replace

from bdn.core.source.uri import HuggingFaceUri, SourceUri, parse_source
from bdn.core.source.weights import WeightsSource
from bdn.mirror.db import damaged, mirrors
from bdn.mirror.db.database import ReadSession
from bdn.mirror.db.tables import MirrorSourceRow
from bdn.wire.weights_schema import body_from


async def recall(
    session: ReadSession, organisation: str, wanted: WeightsSource, revision: str | None
) -> MirrorSourceRow | None:
    """The newest READY source of this organisation with the same repository, revision and patterns."""
    if revision is None:
        return None
    body = body_from(wanted)
    for row in await mirrors.ready_at(session, organisation, revision):
        same_patterns = (
            row.request.get("allow_patterns") == body.allow_patterns
            and row.request.get("ignore_patterns") == body.ignore_patterns
        )
        is_same = same_patterns and _without_revision(parse_source(row.source)) == _without_revision(wanted.source)
        if is_same and not await damaged.is_lost(session, row.manifest or "", organisation):
            return row
    return None


def _without_revision(uri: SourceUri) -> SourceUri:
    return replace(uri, revision=None) if isinstance(uri, HuggingFaceUri) else uri
