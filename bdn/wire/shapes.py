"""Shared shapes of documents: dates, amounts, lists, requests, recorded operations, and errors.

Maps errors to their documents and HTTP statuses: this is the only module that imports both.
"""

import json
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Final, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StrictStr, model_validator
from pydantic_core import PydanticCustomError

from bdn.core import errors
from bdn.core.errors import BdnError, InvalidRequestError, ServiceError

LARGEST: Final = 2**63 - 1

_Item = TypeVar("_Item")
_FIRST: Final = datetime.min.replace(tzinfo=UTC).timestamp()
_LAST: Final = datetime.max.replace(microsecond=0, tzinfo=UTC).timestamp()


def moment(seconds: float) -> datetime:
    """A stored time, in UTC. Times of a clock that is far off are clamped to the range of datetime."""
    return datetime.fromtimestamp(min(max(seconds, _FIRST), _LAST), UTC)


Quantity = Annotated[int, Field(ge=0, le=LARGEST)]
Number = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
LONGEST_TEXT: Final = 64 * 1024  # characters of a message or a fact
Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
Label = Annotated[str, Field(max_length=256)]  # a node, a cluster, a digest, an id
Locator = Annotated[str, Field(max_length=4096)]  # a source, a path, a job
GivenGrant = Annotated[
    StrictStr, Field(min_length=1, max_length=64 * 1024)
]  # more than fits into the head of a request
MOST_LISTED: Final = 100_000  # items of a list in one document without a bound of its own
MOST_FIELDS: Final = 64  # fields of an object that a caller sends; every document of ours has fewer
_WIDE: Final = 10**36  # bound of a number from outside that an error repeats
BoundedFact = (
    Text
    | Annotated[int, Field(ge=-_WIDE, le=_WIDE)]
    | float
    | bool
    | None
    | Annotated[list[Text], Field(max_length=MOST_LISTED, fail_fast=True)]
)
Facts = Annotated[dict[Label, BoundedFact], Field(max_length=MOST_FIELDS)]


def check_json_size(value: _Item, limit: int) -> _Item:
    if (size := len(json.dumps(value))) > limit:
        facts = {"size": size, "limit": limit}
        raise PydanticCustomError("too_large", "is {size} bytes of JSON; the limit is {limit}", facts)
    return value


def added(one: int, other: int) -> int:
    return min(one + other, LARGEST)


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object, or None. Drops the parser's own error, which contains the whole text."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


class Items(BaseModel, Generic[_Item]):
    items: list[_Item]


class Page(BaseModel, Generic[_Item]):
    """Some of something, newest first. ``next_cursor`` is null on the last page."""

    items: list[_Item]
    next_cursor: str | None = None


class StrictModel(BaseModel):
    """A request that rejects unknown fields. Pydantic reports each one, so the number of fields is checked first."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise PydanticCustomError("too_many_fields", "has more than {most} fields", {"most": MOST_FIELDS})
        return value


class SelectingModel(StrictModel):
    """A request with exactly one of ``selectors``."""

    selectors: ClassVar[tuple[str, ...]]

    def check(self) -> None:
        *others, last = self.selectors
        given = [name for name in self.selectors if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            choices = f"{', '.join(others)} and {last}"
            raise InvalidRequestError(f"select by exactly one of {choices}, not by {given or 'nothing'}")


class OperationModel(BaseModel):
    """The record of an operation of any kind."""

    id: str
    status: str
    created_at: datetime
    completed_at: datetime | None = None


class ServiceUnreachableError(ServiceError):
    """No answer at all from one of our services."""

    code = "STORE_UNAVAILABLE"
    transient = True
    address: str
    reason: str

    def describe(self) -> str:
        if self.address.startswith("unix:"):
            return (
                f"no agent answers at {self.address} ({self.reason}): start one with 'bdn up', or set BDN_AGENT_SOCKET"
            )
        return f"no mirror answers at {self.address} ({self.reason}): start one with 'bdn up' on this machine, or set BDN_URL"


class UntrustedServiceError(ServiceUnreachableError):
    """The server at the address has a certificate that this program does not trust."""

    transient = False

    def describe(self) -> str:
        return f"{self.address} is not trusted: {self.reason}"


class ServiceStoppedError(ServiceError):
    """A command's service stopped, or no longer answers. ``holder`` is the program that the command found there."""

    code = "STORE_UNAVAILABLE"
    transient = True
    template = (
        "the service at {address}, which this command used because of {holder}, has stopped or does not answer ({reason}); "
        "run the command again"
    )
    holder: str
    address: str
    reason: str


class WrongDocumentError(ServiceError):
    """An answer does not match its name: damaged in transit, from another request, or wrong where it was stored.

    Retrying helps in all cases but the last.
    """

    code = "CHECKSUM_MISMATCH"
    transient = True
    document: str
    address: str
    reason: str

    def describe(self) -> str:
        return f"{self.document} from {self.address} is wrong: {self.reason}"


STATUS: Final[dict[type[BdnError], int]] = {
    errors.AuthRequiredError: 422,
    errors.NotSupportedError: 400,
    errors.NotFoundError: 404,
    errors.UnauthenticatedError: 401,
    errors.ForeignRequestError: 403,
    errors.GrantInvalidError: 403,
    errors.GrantExpiredError: 403,
    errors.InUseError: 409,
    errors.CanceledError: 409,
    errors.ChunksMissingError: 409,
    errors.CacheAffinityError: 409,
    errors.CacheNotSharedError: 409,
    errors.LimitExceededError: 413,
    errors.CallerError: 422,
    errors.UpstreamError: 502,
    errors.NoRoomError: 507,
    errors.QuotaExceededError: 507,
    errors.ScratchFullError: 507,
    errors.CacheOverQuotaError: 507,
    errors.CacheTooSmallError: 507,
    errors.CacheFullError: 507,
    errors.ServiceError: 503,
    WrongDocumentError: 502,
    errors.InternalError: 500,
    BdnError: 500,
}


class ErrorBody(BaseModel):
    """An error for people (``message``) and programs (``code``, ``retryable``, ``details``)."""

    code: Label
    message: Text
    retryable: bool
    details: Facts = {}


_EXAMPLE: Final[dict[str, JsonValue]] = {
    "code": "NOT_FOUND",
    "message": "mirror mir_0123456789ab does not exist, or is not yours",
    "retryable": False,
    "details": {"what": "mirror mir_0123456789ab"},
}


class ErrorDocument(BaseModel, json_schema_extra={"examples": [{"error": _EXAMPLE}]}):
    """Every answer that is not a success has this form."""

    error: ErrorBody


class ReportedError(BdnError):
    """An error reported by another of our programs, with its code, message and facts."""

    body: ErrorBody

    def __post_init__(self) -> None:
        self.code = self.body.code  # type: ignore[misc] # the class attribute is a default for instances
        self.transient = self.body.retryable  # type: ignore[misc]

    def describe(self) -> str:
        return self.body.message

    def details(self) -> dict[str, errors.Fact]:
        return self.body.details


# The class of each code, so that a reported error keeps the status it had in the other program.
_KINDS: Final = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, BdnError) and "code" in vars(kind)
}


def by_class(error: ReportedError) -> BdnError:
    """The error as an instance of the class of its code, which callers can catch; unchanged if the code is unknown."""
    kind = _KINDS.get(error.code)
    return error if kind is None else kind.as_reported(str(error), error.details(), retryable=error.transient)


def status_of(error: BdnError) -> int:
    """The status of the nearest listed ancestor, so that a new error needs no edit here."""
    kind = _KINDS.get(error.code, BdnError) if isinstance(error, ReportedError) else type(error)
    return next(STATUS[ancestor] for ancestor in kind.__mro__ if ancestor in STATUS)


def body_of(error: BdnError) -> ErrorBody:
    """The document's inside, as stored, sent and printed."""
    message, details = str(error)[:LONGEST_TEXT], {name: _short(fact) for name, fact in error.details().items()}
    return ErrorBody(code=error.code, message=message, retryable=error.transient, details=details)


def _short(fact: errors.Fact) -> errors.Fact:
    """The fact within the bounds of a document: it may repeat what was sent."""
    match fact:
        case str():
            return fact[:LONGEST_TEXT]
        case list():
            return [one[:LONGEST_TEXT] for one in fact[:MOST_LISTED]]
        case bool() | None | float():
            return fact
        case int():
            return min(max(fact, -_WIDE), _WIDE)


def document_of(error: BdnError, *, is_flat: bool = False) -> dict[str, Any]:
    """The error document. ``is_flat``: also with ``code`` and ``message`` at its top, where clients of ``/v1`` look."""
    body = body_of(error)
    flat = {"code": body.code, "message": body.message} if is_flat else {}
    return {**flat, **ErrorDocument(error=body).model_dump()}


def error_from(status: int, content: bytes) -> BdnError:
    """The error reported by an answer of one of our services, or an internal error if it reports none."""
    try:
        return ReportedError(ErrorDocument.model_validate_json(content).error)
    except ValueError:
        if status in (502, 503, 504):  # from a gateway in front of the service, which may be restarting
            return errors.StoreUnavailableError(f"a gateway answered {status}")
        return errors.InternalError(f"unexpected answer {status}: {content[:200]!r}")
