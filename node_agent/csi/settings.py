"""Settings of the CSI driver: environment variables, those that it shares with the agent under the agent's names."""

from pathlib import Path
from socket import gethostname
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import SettingsConfigDict

from bdn.settings import FileSettings, LogForm, ServiceUrl, default_data_dir

_SHARED: Final = {name: f"BDN_{name.upper()}" for name in ("data_dir", "url", "auth", "log", "tls_ca")}


def _absolute(path: Path) -> Path:
    if not path.is_absolute() or ".." in path.parts:
        raise ValueError("must be an absolute path without '..', such as /var/lib/kubelet")
    return path


class CsiSettings(FileSettings):
    """Settings of the operator. The file ``BDN_CONFIG`` sets only what all BDN programs share."""

    model_config = SettingsConfigDict(env_prefix="BDN_CSI_", extra="ignore", populate_by_name=True)

    data_dir: Path = Field(default_factory=default_data_dir, validation_alias=_SHARED["data_dir"])
    url: ServiceUrl = Field(default="http://127.0.0.1:8460", validation_alias=_SHARED["url"])
    auth: Literal["off", "token"] = Field(default="off", validation_alias=_SHARED["auth"])
    log: LogForm = Field(default="logfmt", validation_alias=_SHARED["log"])
    tls_ca: Path | None = Field(default=None, validation_alias=_SHARED["tls_ca"])
    agent_socket: Path | None = Field(default=None, validation_alias="BDN_AGENT_SOCKET")
    cache_dir: Path | None = Field(default=None, validation_alias="BDN_AGENT_CACHE_DIR")
    mounts_dir: Path | None = Field(default=None, validation_alias="BDN_AGENT_MOUNTS_DIR")
    kubelet_dir: Annotated[Path, AfterValidator(_absolute)] = Path("/var/lib/kubelet")  # its --root-dir
    node: Annotated[str, Field(min_length=1, max_length=256)] = Field(default_factory=gethostname)

    @classmethod
    def chosen(cls, content: dict[str, Any]) -> dict[str, Any]:
        return {alias: content[field] for field, alias in _SHARED.items() if field in content}

    @property
    def effective_mounts_dir(self) -> Path:
        """Where the agent shows stages, by the agent's own defaults."""
        return (self.mounts_dir or (self.cache_dir or self.data_dir / "cache") / "mounts").absolute()
