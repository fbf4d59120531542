"""Where redirects may lead, and what goes along."""

from __future__ import annotations

from typing import Final
from urllib.parse import urljoin

from bdn.core.ports import Headers
from bdn.net.http1.request import split_address

REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
REDIRECT_LIMIT: Final = 5
REDIRECT_BODY_LIMIT: Final = 64 * 1024  # read to keep the connection; a longer one is not worth it

# What another origin may hear. Everything else may be a credential, by whatever name a source signs its requests.
_HARMLESS: Final = frozenset({"accept", "accept-encoding", "if-match", "range", "user-agent", "x-amz-checksum-mode"})


class DowngradeError(Exception):
    """A redirect leads from https to http.

    Refused with and without credentials: what comes in the clear may be anybody's, and only some upstreams offer a checksum.
    """


def follow(url: str, headers: dict[str, str], answer: Headers) -> tuple[str, dict[str, str]]:
    """The next address and what to send there: to another origin, only what is plainly harmless.

    Raises:
        DowngradeError: it leads out of https.
        UnsendableError: it leads nowhere.
    """
    target = urljoin(url, answer.get("Location") or "")
    here, (there, _) = split_address(url)[0], split_address(target)
    if here[0] == "https" and there[0] == "http":
        raise DowngradeError
    if there != here:
        headers = {name: value for name, value in headers.items() if name.lower() in _HARMLESS}
    return target, headers
