"""Checks of proxies and certificate authorities in the environment, before a library reads them.

A library would report a wrong one without the variable's name, or as an unreachable server.
"""

import os
import ssl
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

from bdn.core.errors import InvalidRequestError

_PROXIES: Final = ("http", "https", "all")  # BDN reads no other variables, such as ftp_proxy


def check_authorities(environ: Mapping[str, str], *files: str) -> None:
    """Refuse unreadable authorities. ``files`` name further variables beside ``SSL_CERT_FILE``. Blocking.

    Raises ``InvalidRequestError``, which names variable and path.
    """
    for name in ("SSL_CERT_FILE", *files):
        if path := environ.get(name):
            _check_authorities(name, path)
    folders = environ.get("SSL_CERT_DIR")
    if folders and not any(Path(one).is_dir() for one in folders.split(os.pathsep)):
        raise InvalidRequestError(
            f"SSL_CERT_DIR: {folders} is not a directory; name one with certificates, or unset it"
        )


def check_proxies() -> None:
    """Refuse unusable proxies of the environment.

    Raises ``InvalidRequestError``, which names the variable, but not the address: it may hold a password.
    """
    used = getproxies_environment()  # lower-case names have precedence
    if "*" in (one.strip() for one in used.get("no", "").split(",")):
        return
    for kind in _PROXIES:
        if not (address := used.get(kind)):
            continue
        name = next((name for name in (f"{kind}_proxy", f"{kind}_PROXY".upper()) if os.environ.get(name)), kind)
        try:
            parts = urlsplit(address if "://" in address else f"http://{address}")
            is_usable = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_usable = False
        if not is_usable:
            scheme = address.partition("://")[0] if "://" in address else ""
            shown = f"{scheme}://…" if scheme.isalnum() else "its value"
            raise InvalidRequestError(
                f"{name}: {shown} is not a proxy that can be used; name one at an http:// address, such as "
                "http://proxy:3128, or unset the variable"
            )


def _check_authorities(name: str, path: str) -> None:
    try:
        found = Path(path).stat()
        _load(path, found.st_mtime_ns, found.st_size)
    except (OSError, ValueError) as error:  # ``ssl.SSLError`` is an OSError
        is_content = isinstance(error, ssl.SSLError)
        reason = "it holds no certificates in PEM" if is_content else getattr(error, "strerror", None) or error
        raise InvalidRequestError(
            f"{name}: {path} cannot be read: {reason}; name a file of authorities, or unset it"
        ) from None


@lru_cache(maxsize=8)
def _load(path: str, changed: int, size: int) -> None:  # noqa: ARG001 - the key: a changed file is read again
    """Load the file like a library would: 20 ms for the public authorities."""
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
