"""Every error that BDN raises on purpose, in one tree by the party at fault.

``code`` is the name that users see (docs/contract.md). ``transient``: the same call may succeed later. The facts are
the dataclass fields. The message is built from the facts, states the remedy, and never holds a secret or a signed URL.
HTTP statuses are in ``bdn.wire.shapes``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import ClassVar, Final, Self, dataclass_transform

from bdn.core.units import format_size

Fact = str | int | float | bool | None | list[str]


@dataclass_transform(eq_default=False)
@dataclass(eq=False)
class BdnError(Exception):
    """The root of the tree. Each subclass becomes a dataclass automatically; its fields are the facts."""

    code: ClassVar[str] = "INTERNAL"
    transient: ClassVar[bool] = False
    is_brief: ClassVar[bool] = False  # transient: passes soon or never
    template: ClassVar[str] = ""  # the message, as a format string over the facts
    reported: ClassVar[tuple[str, dict[str, Fact]] | None] = None  # message and facts, as another program wrote them

    def __init_subclass__(cls) -> None:
        dataclass(eq=False)(cls)

    @classmethod
    def as_reported(cls, message: str, details: dict[str, Fact], *, retryable: bool) -> Self:
        """An error that another program raised. Facts that it did not report are not attributes."""
        error = cls.__new__(cls)
        for field in fields(cls):
            if field.name in details:
                fact = details[field.name]
                vars(error)[field.name] = tuple(fact) if isinstance(fact, list) else fact
        vars(error).update(reported=(message, details), transient=retryable)
        return error

    def __str__(self) -> str:
        return self.message

    @property
    def message(self) -> str:
        """What failed, and what to do; for people."""
        return self.describe() if self.reported is None else self.reported[0]

    @property
    def retryable(self) -> bool:
        """``transient``, as the contract calls it."""
        return self.transient

    def describe(self) -> str:
        return self.template.format(**vars(self))

    def details(self) -> dict[str, Fact]:
        """The facts as plain JSON values, for the error document."""
        if self.reported is not None:
            return self.reported[1]
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in facts.items()}


# --- the caller's mistakes -------------------------------------------------------------------------------------------


class CallerError(BdnError):
    """The request is wrong; repeating it unchanged fails again."""


class InvalidRequestError(CallerError):
    code = "INVALID_REQUEST"
    template = "{problem}"
    problem: str


class InvalidSourceError(CallerError):
    code = "INVALID_SOURCE"
    source: str
    problem: str

    def describe(self) -> str:
        return self.problem if self.source in self.problem else f"{self.source}: {self.problem}"


class InvalidMountError(CallerError):
    code = "INVALID_MOUNT"
    template = "mount_location {mount_location!r} {problem}"
    mount_location: str
    problem: str


# For callers of the API; commands substitute their own option.
NAME_A_SECRET: Final = (
    'Add "auth": {"auth_method": "CUSTOM_SECRET", "auth_secret_name": "NAME"} to the source (bdn pull: --secret NAME)'  # noqa: S105 - a name
)


class AuthRequiredError(CallerError):
    code = "AUTH_REQUIRED"
    source: str
    reason: str
    remedy: str = ""  # what to do, where another secret does not help

    def describe(self) -> str:
        remedy = self.remedy or (
            f"{NAME_A_SECRET} and store the credentials under that name, for example in the environment variable "
            "BDN_SECRET_NAME. If the source names a secret already, its value does not grant access; if it names a role or a "
            "service account, that identity may not read the source"
        )
        return f"{self.source} refused access ({self.reason}). {remedy}"


class SecretNotFoundError(CallerError):
    code = "SECRET_NOT_FOUND"
    template = (
        "secret {secret_name!r} does not exist. Set it with 'bdn-admin secrets set {secret_name}', or for the mirror set the "
        "environment variable BDN_SECRET_{secret_name} or write the file {secret_name} in BDN_SECRETS_DIR"
    )
    secret_name: str


class SecretMalformedError(CallerError):
    code = "SECRET_MALFORMED"
    template = "secret {secret_name!r} {problem}"
    secret_name: str
    problem: str


class NoFilesMatchedError(CallerError):
    code = "NO_FILES_MATCHED"
    source: str
    files_listed: int
    allow_patterns: tuple[str, ...]
    ignore_patterns: tuple[str, ...]
    hint: str = ""

    def describe(self) -> str:
        if not self.files_listed:
            return f"{self.source} holds no files"
        hint = f". {self.hint}" if self.hint else ""
        patterns = {"allow_patterns": self.allow_patterns, "ignore_patterns": self.ignore_patterns}
        given = " and ".join(f"{name} {', '.join(map(repr, some))}" for name, some in patterns.items() if some)
        none = "the 1 file" if self.files_listed == 1 else f"none of the {self.files_listed} files"
        verb = "is not selected" if self.files_listed == 1 else "is selected"
        return f"{none} of {self.source} {verb} by {given}{hint}"


class LimitExceededError(CallerError):
    code = "LIMIT_EXCEEDED"
    template = "{what}: {value} is over the limit of {limit}"
    what: str
    value: int
    limit: int


class EgressRefusedError(CallerError):
    code = "EGRESS_REFUSED"
    template = "{host} may not be contacted: {reason}; the operator can allow it in BDN_EGRESS_ALLOW"
    host: str
    reason: str


class NotFoundError(CallerError):
    code = "NOT_FOUND"
    template = "{what} does not exist, or is not yours"
    what: str


class UnauthenticatedError(CallerError):
    code = "UNAUTHENTICATED"
    template = "{problem}"
    problem: str = "this call needs a token: send Authorization: Bearer TOKEN (commands: set BDN_TOKEN)"


class ForeignRequestError(CallerError):
    code = "FOREIGN_REQUEST"
    template = (
        "{header} {value!r} is refused: without tokens this service answers programs and its own pages on this machine alone. "
        "Call http://localhost, http://127.0.0.1 or http://[::1], and an agent by its unix socket; for other names and pages "
        "set BDN_AUTH=token and BDN_TOKEN"
    )
    header: str
    value: str


class GrantInvalidError(CallerError):
    code = "GRANT_INVALID"
    template = "the grant is not valid: {problem}"
    problem: str


class GrantExpiredError(CallerError):
    code = "GRANT_EXPIRED"
    template = "the grant expired at {expired_at}; read the mirror again for a fresh one"
    expired_at: str


class InUseError(CallerError):
    code = "IN_USE"
    what: str
    holders: tuple[str, ...]

    def describe(self) -> str:
        return f"{self.what} is in use by {', '.join(self.holders)}"


class NotSupportedError(CallerError):
    code = "NOT_SUPPORTED"
    template = "{what} is not supported here: {remedy}"
    what: str
    remedy: str


class CacheAffinityError(CallerError):
    code = "CACHE_AFFINITY"
    project: str
    cluster: str  # the cluster that the project is pinned to
    gpu_type: str | None
    is_offered: bool = False  # whether the cluster has the GPU type

    def describe(self) -> str:
        ways = "or set require_cache_affinity to false, and start with an empty cache in another cluster that has it"
        if self.is_offered:
            return f"the training cache of project {self.project} is in cluster {self.cluster}, which offers what the job requests: run it there"
        wanted = f"no GPU {self.gpu_type}" if self.gpu_type else "not what the job requests"
        return (
            f"the training cache of project {self.project} is in cluster {self.cluster}, which has {wanted}: request GPUs "
            f"that this cluster has, {ways}"
        )


class CacheNotSharedError(CallerError):
    code = "CACHE_NOT_SHARED"
    template = (
        "the training cache of cluster {cluster} is on the volume {volume}, and this node has {asked}: set BDN_AGENT_VOLUME_ROOT to "
        "a directory that all nodes of the cluster share"
    )
    cluster: str
    volume: str
    asked: str


class PushGivenUpError(CallerError):
    code = "PUSH_GIVEN_UP"
    template = "the push of {source} expired, because no client continued it for an hour; push again: for a while, chunks that were sent are not sent again"
    source: str


class ChunksMissingError(CallerError):
    code = "CHUNKS_MISSING"
    template = "{count} chunks of the push are missing, such as {chunks}: request the list of missing chunks, send them, and commit again"
    count: int
    chunks: tuple[str, ...]


class CanceledError(CallerError):
    code = "CANCELED"
    template = "{what} was canceled"
    what: str


# --- upstream failures ------------------------------------------------------------------------------------------------


class UpstreamError(BdnError):
    """A hub or bucket refused, failed, or sent other content than announced."""


class SourceNotFoundError(UpstreamError):
    code = "SOURCE_NOT_FOUND"
    template = "{source} was not found: {reason}"
    source: str
    reason: str


class RevisionNotFoundError(UpstreamError):
    code = "REVISION_NOT_FOUND"
    template = "{source} has no revision {revision!r}; name a branch, a tag or a commit that exists"
    source: str
    revision: str


class GatedSourceError(UpstreamError):
    code = "GATED_SOURCE"
    template = "{source} is gated: accept its terms on the hub with the account that owns the token, and give its token as a secret, or in HF_TOKEN"
    source: str


class SourceChangedError(UpstreamError):
    code = "SOURCE_CHANGED"
    template = "{path!r} of {source} changed while it was copied ({reason}); mirror it again"
    source: str
    path: str
    reason: str


class SourceArchivedError(UpstreamError):
    code = "SOURCE_ARCHIVED"
    template = (
        "{path!r} of {source} is archived ({storage_class}) and cannot be read: restore it first (S3: aws s3api restore-object; Azure: az storage blob set-tier), wait "
        "until it is restored, and mirror it again"
    )
    source: str
    path: str
    storage_class: str


class UpstreamUnavailableError(UpstreamError):
    code = "UPSTREAM_UNAVAILABLE"
    transient = True
    template = "{source} is not available: {reason}"
    source: str
    reason: str
    retry_after_seconds: float | None = None  # from ``Retry-After``, which a 503 may carry like a 429


class UpstreamRateLimitedError(UpstreamError):
    code = "UPSTREAM_RATE_LIMITED"
    transient = True
    source: str
    retry_after_seconds: float | None = None

    def describe(self) -> str:
        after = f"; it says to wait {self.retry_after_seconds:g} s" if self.retry_after_seconds is not None else ""
        return f"{self.source} limits our requests (429){after}"


class ChecksumMismatchError(UpstreamError):
    code = "CHECKSUM_MISMATCH"
    template = "{subject} has the wrong content: expected {expected}, got {actual}"
    subject: str
    expected: str
    actual: str


# --- our own services ------------------------------------------------------------------------------------------------


class ServiceError(BdnError):
    """The mirror, its store, the agent or its disk failed."""


class StoreUnavailableError(ServiceError):
    code = "STORE_UNAVAILABLE"
    transient = True
    template = "the store of mirrored chunks is not available: {reason}"
    reason: str


class NoRoomError(ServiceError):
    code = "NO_ROOM"
    template = "{what} does not fit. {figures}. Free the disk, select fewer files, or set BDN_STORE or BDN_AGENT_CACHE_DIR to another one"
    what: str
    figures: str


class QuotaExceededError(ServiceError):
    code = "QUOTA_EXCEEDED"
    transient = True
    needed: int
    limit: int

    def describe(self) -> str:
        return (
            f"checkpoints of this organisation would take {format_size(self.needed)}, and BDN_LIMIT_PUSH_BYTES allows "
            f"{format_size(self.limit)}: remove some with 'bdn checkpoints rm', or ask the operator to raise the limit"
        )


class ScratchFullError(ServiceError):
    code = "SCRATCH_FULL"
    path: str
    used_bytes: int | None  # None: too large to count
    limit_bytes: int

    def describe(self) -> str:
        used = "more than BDN can count" if self.used_bytes is None else format_size(self.used_bytes)
        return f"{self.path} holds {used}, over its limit of {format_size(self.limit_bytes)}: stop the run, or give it a larger --scratch"


class CacheOverQuotaError(ServiceError):
    code = "CACHE_OVER_QUOTA"
    project: str
    size_bytes: int
    limit_bytes: int

    def describe(self) -> str:
        return (
            f"the training cache of project {self.project} holds {format_size(self.size_bytes)}, over its limit of "
            f"{format_size(self.limit_bytes)}: 'bdn-admin cache rm {self.project} PATH' deletes files and 'bdn-admin cache "
            f"summarize {self.project}' measures it again; or raise the limit with 'bdn-admin cache set {self.project}'"
        )


class CacheTooSmallError(ServiceError):
    code = "CACHE_TOO_SMALL"
    needed_bytes: int
    budget_bytes: int

    def describe(self) -> str:
        return (
            f"{format_size(self.needed_bytes)} can never fit this cache of {format_size(self.budget_bytes)}; "
            "raise BDN_AGENT_CACHE_BYTES, free the disk, or select fewer files"
        )


class CacheFullError(ServiceError):
    code = "CACHE_FULL"
    transient = True
    needed_bytes: int
    free_bytes: int
    leased_bytes: int
    budget_bytes: int
    needed_files: int | None = None  # set only where the file system lacks inodes
    free_files: int | None = None

    def describe(self) -> str:
        if self.needed_files is not None:
            return (
                f"{self.needed_files} more files do not fit now: the file system has inodes for {self.free_files}, and evicting "
                "what is not in use does not free enough; unstage a job, or recreate the file system with more inodes"
            )
        return (
            f"{format_size(self.needed_bytes)} more do not fit now: of {format_size(self.budget_bytes)}, "
            f"{format_size(self.leased_bytes)} are in use by stages and job volumes and {format_size(self.free_bytes)} are free; "
            "unstage a job or wait for one to end"
        )


class DiskFailedError(ServiceError):
    code = "DISK_FAILED"
    path: str
    reason: str
    is_full: bool = False  # the disk was full
    others_bytes: int | None = None  # taken by other data since the room was promised; None: not measured

    def describe(self) -> str:
        message = f"the disk failed at {self.path}: {self.reason}"
        if self.others_bytes is None:
            return message
        if self.others_bytes > 0:
            return f"{message}; other data took {format_size(self.others_bytes)} of it after BDN reserved the space: find what else writes there"
        return f"{message}; no other data took space after BDN reserved it, so this is a bug: report it with the service's log"


class MountFailedError(ServiceError):
    code = "MOUNT_FAILED"
    template = "{path} could not be mounted: {reason}"
    path: str
    reason: str


class InternalError(ServiceError):
    code = "INTERNAL"
    template = "internal error: {reason}; this is a bug: report it with the service's log"
    reason: str


@contextmanager
def single_error() -> Iterator[None]:
    """Around a ``TaskGroup``: raise only its first failure. The other failures are cancellations, or came later."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__
