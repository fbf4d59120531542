"""The operator's proxy, without the rest of what aiohttp's ``trust_env`` trusts.

That also looks into ``~/.netrc``, whose ``default`` entry would send the operator's password to any token endpoint that a
user's secret names.
"""

from __future__ import annotations

from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def proxy_for(url: str) -> str | None:
    """What ``HTTPS_PROXY`` and ``NO_PROXY`` say now about an https address; None is a direct connection."""
    parts = urlsplit(url)
    if parts.scheme != "https" or proxy_bypass(parts.hostname or ""):
        return None
    proxy = getproxies().get("https")
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"
