"""Where the R2 of an account is: Cloudflare's address, or another one that may have the account's name in it."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

CLOUDFLARE_R2: Final = "https://{account}[.jurisdiction].r2.cloudflarestorage.com"


def r2_address(template: str, account: str, jurisdiction: str) -> str:
    """The server of an account.

    ``{account}``, ``{jurisdiction}`` and ``[.jurisdiction]`` are filled in, the last two with nothing, dot included, where
    there is none. A template without them is the address.
    """
    part = f".{jurisdiction}" if jurisdiction else ""
    filled = template.replace("[.jurisdiction]", part).replace(".{jurisdiction}", part)
    return filled.replace("{jurisdiction}", jurisdiction).replace("{account}", account)


def check_r2_template(template: str) -> str:
    """The template without a final slash.

    Raises:
        ValueError: it does not become an address.
    """
    parts = urlsplit(r2_address(template, "account", "eu"))
    is_address = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
    if not is_address or "@" in parts.netloc or "{" in parts.geturl():
        raise ValueError(f"must be an http or https address, in which placeholders may stand as in {CLOUDFLARE_R2}")
    return template.rstrip("/")
