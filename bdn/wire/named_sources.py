"""Requests for sources that are named by their URIs."""

from pathlib import PurePosixPath

from bdn.core.errors import InvalidRequestError
from bdn.core.source.uri import CheckpointUri, HttpsUri, HuggingFaceUri, parse_source
from bdn.core.units import counted
from bdn.wire.mirror_schema import MirrorRequestBody, WeightsSourceBody


def request_body(
    sources: tuple[str, ...],
    mounts: tuple[str, ...] = (),
    allow: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
    secret: str | None = None,
) -> MirrorRequestBody:
    """A request for these sources. The default mount of a source is ``/models/<its name>``."""
    if len(mounts) > len(sources):
        raise InvalidRequestError(
            f"--mount is given {len(mounts)} times for {counted(len(sources), 'source')}: give it at most once per source"
        )
    weights = [
        WeightsSourceBody(
            source=source,
            mount_location=mounts[position] if position < len(mounts) else default_mount(source),
            auth_secret_name=secret,
            allow_patterns=list(allow) or None,
            ignore_patterns=list(ignore) or None,
        )
        for position, source in enumerate(sources)
    ]
    body = MirrorRequestBody(weights=weights)
    body.sources()  # refuse before anything is sent
    return body


def default_mount(source: str) -> str:
    """``/models/owner/repo`` for a repository, ``/models/<last segment>`` for a bucket's folder or a file."""
    uri = parse_source(source)
    if isinstance(uri, HuggingFaceUri):
        return f"/models/{uri.repo_id}"
    if isinstance(uri, CheckpointUri):
        return f"/models/{uri.project}"
    if isinstance(uri, HttpsUri):
        return f"/models/{PurePosixPath(uri.path).name}"
    return f"/models/{PurePosixPath(uri.prefix).name or uri.bucket}"
