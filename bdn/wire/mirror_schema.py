"""Requests for weights, mirrors and plans, and holdings.

``WeightsSource`` on the wire has the names and both dump forms of ``truss_train`` (unset fields absent or null).
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr

from bdn.core.errors import InvalidRequestError
from bdn.core.source.uri import Auth, AuthMethod, Patterns, WeightsSource, check_mounts, normalise_mount, parse_source
from bdn.wire.shapes import MOST_LISTED, ErrorBody, Locator, Number, Page, StrictModel

SOURCES_LIMIT: Final = 256  # of one mirror; a grant names all of them, and must fit into the head of a request


_Given = Annotated[StrictStr, Field(max_length=4096)]
_Patterns = Annotated[list[_Given], Field(max_length=10_000, fail_fast=True)]
_MOST_SOURCES: Final = 10_000  # are parsed, to report how many are too many


class AuthBody(StrictModel):
    """How to sign in to a source; each method has its own fields."""

    auth_method: _Given
    auth_secret_name: _Given | None = None
    aws_oidc_role_arn: _Given | None = None
    aws_oidc_region: _Given | None = None
    gcp_oidc_service_account: _Given | None = None
    gcp_oidc_workload_id_provider: _Given | None = None
    aws_assume_role_arn: _Given | None = None
    aws_assume_role_region: _Given | None = None

    def to_core(self) -> Auth:
        """Raises ``InvalidRequestError``, which names missing and superfluous fields."""
        try:
            method = AuthMethod(self.auth_method.upper())
        except ValueError:
            known = ", ".join(AuthMethod)
            raise InvalidRequestError(
                f"auth_method {self.auth_method!r} is not supported. Supported auth methods: {known}"
            ) from None
        given = self.model_dump(exclude={"auth_method"}, exclude_none=True)
        return Auth(method, {name: value for name, value in given.items() if value})


class WeightsSourceBody(StrictModel):
    source: Annotated[StrictStr, Field(min_length=1, max_length=4096, examples=["hf://org/model@main"])]
    mount_location: Annotated[StrictStr, Field(min_length=1, max_length=4096, examples=["/app/models/model"])]
    auth: AuthBody | None = None
    auth_secret_name: _Given | None = None
    allow_patterns: _Patterns | None = None
    ignore_patterns: _Patterns | None = None

    def to_core(self) -> WeightsSource:
        """Raises ``CallerError``: INVALID_SOURCE, INVALID_MOUNT or INVALID_REQUEST."""
        return WeightsSource(
            parse_source(self.source),
            normalise_mount(self.mount_location),
            Patterns(tuple(self.allow_patterns or ()), tuple(self.ignore_patterns or ())),
            self._auth(),
        )

    def _auth(self) -> Auth | None:
        if self.auth is None:
            name = self.auth_secret_name
            return Auth(AuthMethod.CUSTOM_SECRET, {"auth_secret_name": name}) if name else None
        if self.auth_secret_name:
            both = self.auth.auth_secret_name is not None
            place = (
                "both at the top level and in auth section. Please use only one location."
                if both
                else "together with auth"
            )
            raise InvalidRequestError(f"auth_secret_name cannot be specified {place}")
        return self.auth.to_core()


class TrainingJobBody(BaseModel):
    """The part of a truss training job that is for BDN; all other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    weights: Annotated[list[WeightsSourceBody], Field(max_length=_MOST_SOURCES, fail_fast=True)] | None


class MirrorRequestBody(
    StrictModel,
    json_schema_extra={
        "examples": [{"weights": [{"source": "hf://org/model@main", "mount_location": "/app/models/model"}]}]
    },
):
    """``{"weights": […]}``, or the body of ``truss train push``, unchanged."""

    weights: Annotated[list[WeightsSourceBody], Field(max_length=_MOST_SOURCES, fail_fast=True)] | None = None
    training_job: TrainingJobBody | None = None

    def sources(self) -> tuple[WeightsSource, ...]:
        """The checked sources, with mounts that are neither equal nor nested. Empty for a job without weights."""
        if self.training_job is not None:
            is_exactly_one, bodies = self.weights is None, self.training_job.weights or []
        else:  # only an explicit null for "weights" means no sources; null for both fields is an error
            is_exactly_one, bodies = (
                self.weights is not None or self.model_fields_set == {"weights"},
                self.weights or [],
            )
        if not is_exactly_one:
            raise InvalidRequestError('send either "weights" or "training_job"')
        if len(bodies) > SOURCES_LIMIT:
            raise InvalidRequestError(
                f"{len(bodies)} sources are too many for one mirror; the limit is {SOURCES_LIMIT}"
            )
        sources = tuple(body.to_core() for body in bodies)
        check_mounts([source.mount_location for source in sources])
        return sources


def body_from(source: WeightsSource) -> WeightsSourceBody:
    """The form that is stored with a mirror, and that clients send."""
    auth = None
    if source.auth:
        auth = AuthBody.model_validate({"auth_method": source.auth.method.value, **source.auth.fields})
    return WeightsSourceBody(
        source=str(source.source),
        mount_location=source.mount_location,
        auth=auth,
        allow_patterns=list(source.patterns.allow) or None,
        ignore_patterns=list(source.patterns.ignore) or None,
    )


MirrorStatus = Literal["PENDING", "SYNCING", "READY", "FAILED", "CANCELED"]
TERMINAL: frozenset[MirrorStatus] = frozenset({"READY", "FAILED", "CANCELED"})


class MirrorSource(BaseModel):
    """One source of a mirror. ``bytes_transferred`` counts bytes read from the upstream that are durable.

    ``bytes_under_way`` were read from the upstream and are not durable yet. Only the process that copies them knows
    them; all other processes report 0.
    """

    source: str
    mount_location: str
    status: MirrorStatus
    resolved_revision: str | None = None
    manifest: str | None = None
    files_total: int | None = None
    bytes_total: int | None = None
    bytes_transferred: int = 0
    bytes_under_way: int = 0
    bytes_reused: int = 0
    warnings: list[str] = []
    error: ErrorBody | None = None


RECORDED: Final = tuple(
    name for name in MirrorSource.model_fields if name != "bytes_under_way"
)  # without ``bytes_under_way``, which is in memory only


class HubFile(BaseModel):
    """A file of a hub's commit. ``blob_id`` is git's name of it, or of its LFS pointer; ``lfs_sha256`` is set for LFS."""

    path: str
    size: Number
    blob_id: str
    lfs_sha256: str | None = None


class Mirror(BaseModel):
    """A request to mirror sources, and its progress; bytes are totals over all sources. ``grant`` is set once READY."""

    id: str
    status: MirrorStatus
    created_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None
    files_total: int | None = None
    bytes_total: int | None = None
    bytes_transferred: int = 0
    bytes_under_way: int = 0
    bytes_reused: int = 0
    bytes_per_second: float | None = None
    eta_seconds: float | None = None
    grant: str | None = None
    error: ErrorBody | None = None
    sources: list[MirrorSource]


class PlannedSource(BaseModel):
    source: str
    mount_location: str
    resolved_revision: str | None
    files: int
    bytes: int
    bytes_to_transfer: int
    bytes_reused: int
    warnings: list[str] = []


class Plan(BaseModel):
    """The answer to a dry run. Nothing was written."""

    sources: list[PlannedSource]
    files: int
    bytes: int
    bytes_to_transfer: int
    bytes_reused: int


ManifestName = Annotated[str, Field(pattern=r"^b3:[0-9a-f]{64}$", max_length=67)]
Locators = Annotated[list[Locator], Field(max_length=MOST_LISTED, fail_fast=True)]


class Holding(BaseModel):
    """A manifest held by some tier. ``held_by`` names stages' jobs; ``last_used`` is in seconds since the epoch.

    ``cluster_bytes`` is the size of the single chunks that an agent holds for its cluster, beside its whole files.
    """

    manifest: ManifestName
    bytes: Number
    complete: bool = True
    last_used: float | None = None
    sources: Locators = []
    held_by: Locators = []
    cluster_bytes: Number = 0


class HeldManifest(BaseModel):
    """One manifest and all places that hold it.

    ``restorable_until``: the manifest was evicted from the mirror, which deletes its bytes with the first collection
    after that.
    """

    manifest: str
    sources: list[str]
    files_total: int | None
    bytes_total: int | None
    mirror: bool
    restorable_until: datetime | None = None
    nodes: dict[str, Holding]


class StoreUse(BaseModel):
    """Bytes of the distinct files in the mirror's store, evicted but uncollected ones included, and of its disk.

    ``disk_free`` and ``disk_total`` are null if the store is a bucket.
    """

    bytes_stored: int
    disk_free: int | None
    disk_total: int | None


class HeldManifests(Page[HeldManifest]):
    """Holdings in the order of the manifests' digests. ``next_cursor`` is null on the last page.

    ``store`` is for operators, and on the first page.
    """

    store: StoreUse | None = None

    def without_holders(self) -> HeldManifests:
        """For tenants: omits jobs, which may belong to other organisations."""
        bare = [
            {node: one.model_copy(update={"held_by": []}) for node, one in item.nodes.items()} for item in self.items
        ]
        items = [item.model_copy(update={"nodes": nodes}) for item, nodes in zip(self.items, bare, strict=True)]
        return HeldManifests(items=items, next_cursor=self.next_cursor)
