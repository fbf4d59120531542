"""Opens the store whose address is in ``BDN_STORE``."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bdn.core.errors import InvalidRequestError, InvalidSourceError
from bdn.core.source.uri import BucketUri, parse_source
from bdn.core.store import MirrorStore
from bdn.sources.environment import check_environment
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import Secret, SourceContext
from bdn.store.directory import DirectoryStore


def settings_of_store(upstreams: UpstreamSettings, endpoint: str | None, region: str | None) -> UpstreamSettings:
    """The settings of upstreams, with the operator's settings for the store in their place."""
    found = replace(upstreams, s3_region=region or upstreams.s3_region, s3_requester_pays=False, s3_addressing="auto")
    if endpoint is None:
        return found
    return replace(found, s3_endpoint_url=endpoint, r2_endpoint_url=endpoint, gcs_endpoint_url=endpoint)


def open_store(
    address: str,
    context: SourceContext,
    *,
    exclusive: bool,
    reread: Callable[[], Awaitable[Secret]] | None = None,
) -> MirrorStore:
    """Open the store at this address; ``context`` has a bucket's credentials. Blocking; the caller closes the store.

    ``reread`` reads the secret of ``context`` again later, on a loop of its own. ``exclusive``: no other process writes
    there, so a directory's leftovers are removed.

    Raises:
        InvalidRequestError: no such store, no credentials, or an unusable environment variable.
        SecretMalformedError: the secret does not contain what the bucket needs.
        StoreUnavailableError: the store does not respond.
    """
    url = urlsplit(address)
    if url.scheme in ("s3", "gs", "r2"):
        return _open_bucket(_bucket_at(address), context, reread)
    if url.scheme != "file" or not url.path.startswith("/") or url.netloc:
        raise InvalidRequestError(
            f"BDN_STORE={address!r} is not the address of a store; use file:///absolute/path, s3://bucket/prefix, gs://bucket/prefix or "
            "r2://account.bucket/prefix"
        )
    store = DirectoryStore(Path(unquote(url.path)))
    if exclusive:
        store.drop_leftovers(float("inf"), dry_run=False)
    return store


def _open_bucket(uri: BucketUri, context: SourceContext, reread: Callable[[], Awaitable[Secret]] | None) -> MirrorStore:
    # Imported late: half a second for cloud libraries, which a directory does not need.
    from bdn.store.access import open_access  # noqa: PLC0415
    from bdn.store.bucket import Bucket  # noqa: PLC0415
    from bdn.store.bucket_store import open_bucket_store  # noqa: PLC0415

    check_environment(uri.scheme)
    bucket = Bucket(uri, open_access(uri, context, reread))
    try:
        return open_bucket_store(bucket)
    except BaseException:
        bucket.close()
        raise


def bucket_of(address: str) -> BucketUri | None:
    """The bucket and prefix at this address; None for a directory."""
    return None if address.startswith("file:") else _bucket_at(address)


def _bucket_at(address: str) -> BucketUri:
    try:
        uri = parse_source(address)
    except InvalidSourceError as error:
        raise InvalidRequestError(f"BDN_STORE: {error}") from None
    if not isinstance(uri, BucketUri):
        raise InvalidRequestError("BDN_STORE is not a bucket")
    return uri
