"""Environment variables of upstreams, checked before the upstreams' libraries read them."""

import os
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from bdn.core.errors import InvalidRequestError
from bdn.core.source.uri import Scheme
from bdn.net.ambient import check_authorities, check_proxies
from bdn.sources.settings import FALSE, S3_ADDRESSING, TRUE

_AWS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS", "AWS_ENDPOINT_URL")
_GOOGLE: Final = ("BDN_GOOGLE_STS_URL", "BDN_GOOGLE_IAM_URL", "BDN_GOOGLE_TOKEN_URL")
_ADDRESSES: Final[Mapping[Scheme, tuple[str, ...]]] = {"hf": ("HF_ENDPOINT",), "s3": _AWS, "gs": _GOOGLE}
_KEYS: Final[Mapping[Scheme, tuple[str, ...]]] = {
    "hf": ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
}
_AUTHORITIES: Final[Mapping[Scheme, tuple[str, ...]]] = {
    "s3": ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"),
    "r2": ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"),
    "cw": ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"),
    "gs": ("AWS_CA_BUNDLE",),
}
_SECONDS: Final = ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT")  # huggingface_hub reads them at import
_OFFLINE: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # names as in huggingface_hub.constants
_REGION: Final = re.compile(r"[A-Za-z]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")


def forbids_hub(environ: Mapping[str, str] = os.environ) -> str | None:
    """The variable that forbids requests to the hub, as ``NAME=value``, or None."""
    name = next((name for name in _OFFLINE if environ.get(name)), "")
    value = environ.get(name, "")
    return f"{name}={value}" if value.upper() in ("1", "ON", "YES", "TRUE") else None


def check_environment(scheme: Scheme, environ: Mapping[str, str] = os.environ) -> None:
    """Check the variables that sources of this scheme read. Blocking.

    Raises ``InvalidRequestError``, which names the variable, and its value unless that is a secret.
    """
    if scheme == "hf":
        if forbidden := forbids_hub(environ):
            raise InvalidRequestError(
                f"{forbidden} forbids requests to the hub; unset it where BDN runs, or pull a commit that is held (--offline)"
            )
        for name in _SECONDS:
            if (value := environ.get(name)) and not re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
                raise InvalidRequestError(f"{name}: must be a whole number of seconds (it is {value!r})")
    check_proxies()
    check_authorities(environ, *_AUTHORITIES.get(scheme, ()))
    for name in _ADDRESSES.get(scheme, ()):
        if (value := environ.get(name)) and not is_address(value):
            shown = "" if "@" in value else f" (it is {value!r})"
            raise InvalidRequestError(f"{name}: must be an http or https address, such as https://host:9000{shown}")
    emulator = environ.get("STORAGE_EMULATOR_HOST")
    if scheme == "gs" and emulator and not is_address(emulator if "://" in emulator else f"http://{emulator}"):
        raise InvalidRequestError(f"STORAGE_EMULATOR_HOST: must be host:port or an address (it is {emulator!r})")
    for name in _KEYS.get(scheme, ()):
        value = environ.get(name, "").strip()
        if not (value.isascii() and value.isprintable()) or " " in value:
            raise InvalidRequestError(
                f"{name}: holds a character that a key cannot have; set it again, without quotes and spaces"
            )
    if scheme == "s3":
        _check_s3(environ)
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        if scheme == "s3" and (value := environ.get(name)) and not _REGION.fullmatch(value):
            raise InvalidRequestError(f"{name}: must be a region, such as eu-west-1 (it is {value!r})")


def _check_s3(environ: Mapping[str, str]) -> None:
    for name, allowed in (
        ("BDN_SOURCE_S3_REQUESTER_PAYS", (*TRUE, *FALSE)),
        ("BDN_SOURCE_S3_ADDRESSING", S3_ADDRESSING),
    ):
        if (value := environ.get(name)) and value.lower() not in allowed:
            raise InvalidRequestError(f"{name}: must be one of {', '.join(allowed)} (it is {value!r})")


def is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not re.search(r"\s", text)
        )
    except ValueError:
        return False
