"""Requests of hub clients that an agent's gateway passes to the mirror: requests and answers of ``POST /hub``."""

from typing import Annotated, Final, Literal

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, JsonValue

from bdn.wire.mirror_schema import ManifestName
from bdn.wire.shapes import LARGEST, StrictModel

LONGEST_TARGET: Final = 8192
LONGEST_BEGINNING: Final = 65_536
_EXAMPLE: Final[dict[str, JsonValue]] = {"method": "GET", "target": "/api/models/org/model/revision/main"}


class HubRequest(StrictModel, json_schema_extra={"examples": [_EXAMPLE]}):
    """A client's request. ``authorization`` is its header, which the mirror sends to the hub and nowhere else.

    ``body`` is a form, as ``content_type`` says, or JSON. ``beginning_at`` asks for bytes of a file from there.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    method: Literal["GET", "HEAD", "POST"]
    target: Annotated[str, Field(min_length=1, max_length=LONGEST_TARGET, pattern=r"^/[\x21-\x7e]*$")]
    authorization: Annotated[str | None, Field(max_length=4096, pattern=r"^[\x20-\x7e]*$", repr=False)] = None
    content_type: Annotated[str, Field(max_length=256)] = ""
    body: Annotated[str, Field(max_length=1024**2)] = ""
    beginning_at: Annotated[int | None, Field(ge=0, le=LARGEST)] = None


class HubContent(BaseModel):
    """Where an agent finds a file: at ``path`` of a manifest, which ``grant`` lets it read."""

    model_config = ConfigDict(hide_input_in_errors=True)

    manifest: ManifestName
    path: str
    size: Annotated[int, Field(ge=0)]
    grant: Annotated[str, Field(repr=False)]


class HubAnswer(BaseModel):
    """The answer to the client. With ``content``, its body is the file.

    ``is_pending``: the mirror copies the file, for ``eta_seconds`` if known; the agent repeats the request.
    ``beginning`` has bytes of the file that are not known to be right: they may come with an error, or with no answer.
    """

    status: Annotated[int, Field(ge=100, le=599)] = 200
    headers: dict[str, str] = {}
    body: str = ""
    content: HubContent | None = None
    is_pending: bool = False
    eta_seconds: float | None = None
    beginning: Annotated[Base64Bytes, Field(max_length=2 * LONGEST_BEGINNING)] = b""
