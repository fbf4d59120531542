"""The commit of a revision of a Hugging Face repository, requested without the hub's client.

Importing the client takes longer than an entire repeated pull. Sends the same two requests as
``HuggingFaceSource.resolve``. An unexpected answer gives None; the caller then uses the client, which reports the
error.
"""

import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final
from urllib.parse import quote

from bdn.core.errors import BdnError
from bdn.core.pace.retry import StallPolicy
from bdn.core.source.uri import COMMIT, HuggingFaceUri
from bdn.net.http1.pool import NETWORK_ERRORS, ConnectionPool
from bdn.sources.environment import check_environment
from bdn.sources.settings import UpstreamSettings

_TIMEOUT_SECONDS: Final = 10.0
_LONGEST_ANSWER: Final = 1024 * 1024  # bytes; the answer for a space lists its files


def commit_now(uri: HuggingFaceUri, settings: UpstreamSettings) -> str | None:
    """The commit of the revision, if the token of ``settings`` may read it; None if unknown. Blocking.

    Raises ``InvalidRequestError``: a variable of the environment cannot be used.
    """
    check_environment("hf")
    headers = {"Accept-Encoding": "identity"}
    if settings.hf_token:
        headers["Authorization"] = f"Bearer {settings.hf_token}"
    repository = f"{settings.hf_endpoint}/api/{uri.kind}s/{quote(uri.repo_id)}"
    revision = f"/revision/{quote(uri.revision, safe='')}" if uri.revision else ""
    expand = "" if uri.kind in ("space", "kernel") else "?expand=sha&expand=private&expand=gated"
    with closing(ConnectionPool(timeout_seconds=_TIMEOUT_SECONDS, egress=settings.egress)) as pool:
        try:
            found = _document(pool, f"{repository}{revision}{expand}", headers)
            commit = found.get("sha") if found else None
            if found is None or not isinstance(commit, str) or not COMMIT.fullmatch(commit):
                return None
            if found.get("gated") is not False and not _is_admitted(pool, f"{repository}/auth-check", headers):
                return None
        except (*NETWORK_ERRORS, BdnError):
            return None
    return commit


def _document(pool: ConnectionPool, url: str, headers: Mapping[str, str]) -> dict[str, Any] | None:
    content = bytearray(_LONGEST_ANSWER)
    with pool.get(url, headers) as answer:
        if answer.status != 200:
            return None
        size = answer.fill(memoryview(content), StallPolicy())
    try:
        found = json.loads(content[:size])  # a longer answer is cut off and not JSON
    except RecursionError:
        return None
    return found if isinstance(found, dict) else None


def _is_admitted(pool: ConnectionPool, url: str, headers: Mapping[str, str]) -> bool:
    """Whether the token may read a gated repository; the hub describes gated repositories to any caller."""
    with pool.get(url, headers) as answer:
        return 200 <= answer.status < 300
