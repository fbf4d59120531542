"""Forms and the checks of requests that change something."""

from typing import Final
from urllib.parse import parse_qsl

from fastapi import Request

from bdn.core.errors import ForeignRequestError, InvalidRequestError, LimitExceededError

_LIMIT_BYTES: Final = 64 * 1024
_MOST_FIELDS: Final = 100
_MEDIA_TYPE: Final = "application/x-www-form-urlencoded"


class ForeignFormError(ForeignRequestError):
    """A request that another site's page sent, with this browser's cookie or without."""

    template = (
        "this form was not sent from this page ({header} {value!r}): open the page itself, and send the form there"
    )


def check_same_origin(request: Request) -> None:
    """Raise ``ForeignFormError`` unless the browser says that a page of this origin sent the request.

    Browsers send ``Sec-Fetch-Site`` over HTTPS and to localhost, and ``Origin`` with each POST.
    """
    site, origin, host = (request.headers.get(name, "") for name in ("sec-fetch-site", "origin", "host"))
    if site == "same-origin" or (
        not site and origin.lower() in (f"{way}://{host}".lower() for way in ("http", "https"))
    ):
        return
    raise ForeignFormError(*(("Sec-Fetch-Site", site[:200]) if site else ("Origin", origin[:200])))


async def form_of(request: Request) -> dict[str, str]:
    """The fields of the form that the request carries; the last of two with one name.

    Raises ``InvalidRequestError`` or ``LimitExceededError``. The server limits the time.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _MEDIA_TYPE:
        raise InvalidRequestError(f"this page accepts forms of the type {_MEDIA_TYPE}: send the form of the page")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _LIMIT_BYTES:
            raise LimitExceededError("bytes of the form", len(body), _LIMIT_BYTES)
    try:
        fields = dict(
            parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="strict")
        )
    except ValueError as error:
        raise InvalidRequestError("the form cannot be read: reload the page, and send it again") from error
    if any("\0" in value for value in fields.values()):
        raise InvalidRequestError("a field of the form contains a NUL character: remove it")
    return fields
