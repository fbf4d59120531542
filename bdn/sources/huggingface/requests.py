"""Requests to a hub about one source, with one token, through the hub's client.

The client downloads nothing and its shared cache is never used: on 401, 403 and 5xx it would silently serve cached
files, which do not prove access.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from huggingface_hub import HfApi, HfFileMetadata
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined] # documented there

from bdn.core.errors import SourceChangedError
from bdn.core.source.upstream import Location, UpstreamFile
from bdn.core.source.uri import BucketUri, HuggingFaceUri
from bdn.sources.huggingface.session import SDK_ERRORS, one_attempt, origin_of, translate
from bdn.sources.sign_in import SourceContext

T = TypeVar("T")


class HubRequests:
    """``token`` None reads anonymously."""

    def __init__(self, uri: HuggingFaceUri | BucketUri, context: SourceContext, token: str | None) -> None:
        self._uri = uri
        self._context = context
        self._token = token
        self.endpoint = context.settings.hf_endpoint.rstrip("/")
        self.api = HfApi(endpoint=self.endpoint, token=token or False, library_name="bdn")

    @property
    def credentials(self) -> tuple[tuple[str, str], ...]:
        return (("Authorization", f"Bearer {self._token}"),) if self._token else ()

    def headers(self) -> dict[str, str]:
        """For requests without ``api``. Blocking: the SDK's first headers may cost a request, so build them in ``call``."""
        return build_hf_headers(token=self._token or False, library_name="bdn")

    async def call(self, work: Callable[[], T], path: str = "") -> T:
        """Run one blocking request of the SDK in a thread. After a cancellation the thread ends with its request."""
        egress = self._context.settings.egress

        def once() -> T:
            # The session checks the host too, but its URLs reject some spellings first, with an error that looks
            # transient.
            egress.admit(urlsplit(self.endpoint).hostname or "")
            with one_attempt(egress, self.endpoint):
                return work()

        async def ask() -> T:
            try:
                return await asyncio.to_thread(once)
            except SDK_ERRORS as error:
                raise translate(error, self._uri, path, anonymous=self._token is None) from error

        return await self._context.asker.ask(self.endpoint, ask)

    async def head(self, url: str, file: UpstreamFile) -> HfFileMetadata:
        """What the hub says of a file at its address there. Raises ``SourceChangedError``: another size, or no file."""
        metadata = await self.call(lambda: self.api.get_hf_file_metadata(url=url), path=file.path)
        if metadata.size is not None and metadata.size != file.size:
            reason = f"listed with {file.size} bytes, now {metadata.size}"
            raise SourceChangedError(str(self._uri), file.path, reason)
        return metadata

    def is_own(self, url: str) -> bool:
        """Whether the hub itself answers there, not a CDN."""
        return origin_of(url) == origin_of(self.endpoint)

    def location(self, url: str) -> Location:
        return Location(url, self.credentials if self.is_own(url) else ())
