"""A caller's own requests to the hub's API, sent with the caller's token, which is kept nowhere."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import httpx2

from bdn.sources.environment import check_environment
from bdn.sources.settings import UpstreamSettings

_PATIENCE: Final = httpx2.Timeout(8.0, connect=1.5)  # seconds: the caller waits
_LARGEST: Final = 16 * 1024**2  # bytes of one answer of the API
_PASSED: Final = ("content-type", "retry-after", "x-repo-commit", "x-error-code", "x-error-message")
_XET: Final = ("x-xet-cas-url", "x-xet-access-token", "x-xet-token-expiration")


@dataclass(frozen=True)
class HubReply:
    """``next_page`` is the target of the next page of a listing; ``moved_to``: of a redirect. Both are at the hub."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    next_page: str | None = None
    moved_to: str | None = None

    @property
    def is_outage(self) -> bool:
        """Whether the hub cannot answer this request now."""
        return self.status in (408, 500, 502, 503, 504)


@dataclass(frozen=True)
class HubForwarder:
    """``threads`` wait for the hub, which may be slow; no other work waits for them."""

    settings: UpstreamSettings
    threads: ThreadPoolExecutor

    @property
    def endpoint(self) -> str:
        return self.settings.hf_endpoint.rstrip("/")

    async def ask(
        self,
        method: str,
        target: str,
        authorization: str | None,
        *,
        content_type: str = "",
        body: str = "",
        is_xet: bool = False,
    ) -> HubReply | None:
        """The hub's answer, without headers that lead around BDN, unless it ``is_xet`` that is requested.

        None: the hub did not answer in time. If it cannot be reached, the status is 503.

        Raises ``EgressRefusedError``: the hub's address is not allowed.
        """
        headers = {"Authorization": authorization} if authorization else {}
        if content_type:
            headers["Content-Type"] = content_type
        passed = (*_PASSED, *(_XET if is_xet else ()))
        ask = partial(self._ask, method, target, headers, body.encode(), passed)
        return await asyncio.get_running_loop().run_in_executor(self.threads, ask)

    def _ask(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes, passed: Sequence[str]
    ) -> HubReply | None:
        # Here: the hub's client costs 250 ms and tens of megabytes, and most mirrors answer no gateway.
        from huggingface_hub import get_session  # noqa: PLC0415
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled  # noqa: PLC0415

        from bdn.sources.huggingface.session import HubUnreachableError, one_attempt  # noqa: PLC0415

        check_environment("hf")
        egress = self.settings.egress
        egress.admit(urlsplit(self.endpoint).hostname or "")
        try:
            with one_attempt(egress, self.endpoint):
                response = get_session().request(
                    method,
                    f"{self.endpoint}{target}",
                    headers=dict(headers),
                    content=body or None,
                    follow_redirects=False,
                    timeout=_PATIENCE,
                )
        except HfHubHTTPError as error:  # the statuses that the SDK would repeat
            response = error.response
        except (HubUnreachableError, OfflineModeIsEnabled, httpx2.HTTPError) as error:
            return None if isinstance(error.__cause__ or error, httpx2.TimeoutException) else HubReply(503, {}, b"")
        if len(response.content) > _LARGEST:
            return HubReply(502, {}, b"")
        kept = {name: response.headers[name] for name in passed if name in response.headers}
        next_page, moved_to = response.links.get("next", {}).get("url"), response.headers.get("location")
        return HubReply(response.status_code, kept, response.content, self._target(next_page), self._target(moved_to))

    def _target(self, link: str | None) -> str | None:
        """None also for a link to another host: the caller's token would go there."""
        link = (link or "").removeprefix(self.endpoint)
        return link if link.startswith("/") and not link.startswith("//") else None
