"""Where commands find the services, and how a command line becomes sources."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import Field

from bdn.core.caller import ORGANISATION_PATTERN
from bdn.core.source.uri import HuggingFaceUri, parse_source
from bdn.net.client.mirror_client import AgentClient, MirrorClient
from bdn.settings import FileSettings, default_data_dir
from bdn.wire.weights_schema import MirrorRequestBody, WeightsSourceBody


class ClientSettings(FileSettings):
    """The addresses and the token that commands use."""

    url: str = "http://127.0.0.1:8460"
    token: str | None = Field(default=None, repr=False)
    organisation: Annotated[str | None, Field(pattern=f"^{ORGANISATION_PATTERN}$")] = None  # for an operator's commands
    data_dir: Path = Field(default_factory=default_data_dir)
    agent_socket: Annotated[Path | None, Field(description="BDN_AGENT_SOCKET")] = None

    @property
    def effective_agent_socket(self) -> Path:
        """The agent's socket, the default included."""
        return self.agent_socket or self.data_dir / "agent.sock"


def mirror_client() -> MirrorClient:
    """The mirror at ``BDN_URL``."""
    settings = ClientSettings()
    return MirrorClient(settings.url, settings.token, organisation=settings.organisation)


def agent_client() -> AgentClient:
    """The agent on this machine."""
    return AgentClient(f"unix:{ClientSettings().effective_agent_socket}")


def request_body(
    sources: tuple[str, ...],
    mounts: tuple[str, ...] = (),
    allow: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
    secret: str | None = None,
) -> MirrorRequestBody:
    """A request for these sources; a source without a mount of its own stands at ``/models/<its name>``."""
    weights = [
        WeightsSourceBody(
            source=source,
            mount_location=mounts[position] if position < len(mounts) else default_mount(source),
            auth_secret_name=secret,
            allow_patterns=list(allow) or None,
            ignore_patterns=list(ignore) or None,
        )
        for position, source in enumerate(sources)
    ]
    body = MirrorRequestBody(weights=weights)
    body.sources()  # refuse before anything is sent
    return body


def default_mount(source: str) -> str:
    """``/models/owner/repo`` for a repository, ``/models/<last segment>`` for a bucket's folder."""
    uri = parse_source(source)
    if isinstance(uri, HuggingFaceUri):
        return f"/models/{uri.repo_id}"
    return f"/models/{PurePosixPath(uri.prefix).name or uri.bucket}"
