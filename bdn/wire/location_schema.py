"""Addresses in the mirror's bucket at which agents read chunks: requests and answers of ``POST /chunks/locations``."""

from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StrictStr

from bdn.wire.mirror_schema import ManifestName
from bdn.wire.shapes import StrictModel

# How chunks get from the mirror's store to agents: directly from its bucket, or through the mirror's data plane.
Delivery = Literal["direct", "proxy"]
LOCATIONS_AT_ONCE: Final = 1000

_ZEROS: Final = f"b3:{'0' * 64}"
_EXAMPLE: Final[dict[str, JsonValue]] = {"manifest": _ZEROS, "digests": [_ZEROS]}


class LocationsRequest(StrictModel, json_schema_extra={"examples": [_EXAMPLE]}):
    """Chunks and slabs that belong to ``manifest``."""

    manifest: ManifestName
    digests: Annotated[list[ManifestName], Field(min_length=1, max_length=LOCATIONS_AT_ONCE, fail_fast=True)]


class ChunkLocation(BaseModel):
    """A GET of ``url`` with ``headers``, optionally ``Range``, returns the chunk for ``expires_in_seconds`` from now.

    ``url`` and ``headers`` may be signed: they are never logged, stored or shown. The expiry is relative because clocks
    differ.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    digest: ManifestName
    url: Annotated[str, Field(repr=False)]
    headers: Annotated[dict[str, str], Field(repr=False)]
    expires_in_seconds: float


class Locations(BaseModel):
    """``items`` lacks chunks that are damaged in the store. With the delivery ``proxy`` it is empty: use the data plane."""

    model_config = ConfigDict(hide_input_in_errors=True)

    delivery: Delivery
    items: list[ChunkLocation] = []


PATHS_AT_ONCE: Final = 1000


class AddressesRequest(StrictModel, json_schema_extra={"examples": [{"paths": ["config.json"]}]}):
    """Files of a manifest, by their paths in it."""

    paths: Annotated[
        list[Annotated[StrictStr, Field(max_length=4096)]],
        Field(min_length=1, max_length=PATHS_AT_ONCE, fail_fast=True),
    ]


class FileAddress(BaseModel):
    """A GET of ``url``, below the address of the mirror's API, returns the file to any client until ``expires_at``."""

    path: str
    url: Annotated[str, Field(repr=False)]
    size_bytes: int
    expires_at: datetime
