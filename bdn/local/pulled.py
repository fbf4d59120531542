"""A pull, its result, and whether the result is at its directory already.

Imports no service: a pull that has nothing to do ends within 0.5 s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from bdn.core.errors import NotFoundError
from bdn.core.source.uri import HuggingFaceUri
from bdn.mirror.db.recall import held_in, note_use_in
from bdn.mirror.settings import embedded_settings
from bdn.sources.environment import forbids_hub
from bdn.wire.access_schema import DEFAULT_ORGANISATION
from bdn.wire.stage_schema import BytesFrom, StageMount

if TYPE_CHECKING:
    from bdn.core.source.uri import WeightsSource
    from bdn.local.hub_cache import HubRepository
    from bdn.mirror.settings import MirrorSettings
    from bdn.wire.mirror_schema import MirrorSource

Say = Callable[[str], object]  # called with a line for people


@dataclass(frozen=True, slots=True)
class Pull:
    """Put the files of a source at a directory: ``bdn pull`` with its options.

    With ``hub`` the directory is the folder of a repository, and the files are put into the snapshot of the commit.
    """

    wanted: WeightsSource
    destination: Path
    offline: bool = False
    replace: bool = False
    link: bool = False
    hub: HubRepository | None = None

    def at(self, commit: str | None) -> Path:
        """Where the files of the commit are put."""
        return self.destination if self.hub is None else self.hub.snapshot(commit)


class Pulled(BaseModel):
    """What a pull did. ``bytes_transferred`` came from the upstream; ``bytes_from`` are the view's bytes by tier."""

    source: str
    destination: str
    resolved_revision: str | None
    manifest: str
    files_total: int
    bytes_total: int
    bytes_transferred: int
    bytes_from: BytesFrom
    view: str | None
    warnings: list[str]
    seconds: float


def result_of(pull: Pull, mirrored: MirrorSource, mount: StageMount, *, transferred: int, seconds: float) -> Pulled:
    return Pulled(
        source=str(pull.wanted.source),
        destination=mount.path,
        resolved_revision=mirrored.resolved_revision,
        manifest=mount.manifest,
        files_total=mount.files_total or 0,
        bytes_total=mount.bytes_total or 0,
        bytes_transferred=transferred,
        bytes_from=mount.bytes_from,
        view=mount.view,
        warnings=mirrored.warnings,
        seconds=round(seconds, 4),
    )


def as_mirrored(source: MirrorSource, mirrored_at: float) -> str:
    """The revision and the time of the mirror, for people."""
    revision = f" at {source.resolved_revision}" if source.resolved_revision else ""
    return f"{source.source}{revision}, as mirrored {datetime.fromtimestamp(mirrored_at, UTC):%Y-%m-%d %H:%M} UTC"


def not_held(wanted: WeightsSource) -> NotFoundError:
    """The error of an offline pull of files that are not held."""
    forbidden = forbids_hub() if wanted.source.scheme == "hf" else None
    return NotFoundError(
        f"{wanted.source} among the pulls of this machine (pull it without {forbidden or '--offline'})"
    )


def check_held(wanted: WeightsSource, data_dir: Path) -> None:
    """Raises ``NotFoundError`` if nothing was ever pulled, without starting a mirror."""
    settings = embedded_settings(data_dir)
    if not settings.database_url and not settings.usual_database.exists():
        raise not_held(wanted)


def standing_result(pull: Pull, data_dir: Path, say: Say) -> Pulled | None:
    """The result of a pull that has nothing to do, because the directory has the source, intact. Blocking.

    Records the use. For a branch, requests its current commit from the upstream. None if in doubt: a mirror and an
    agent then check.
    """
    settings, wanted, uri = embedded_settings(data_dir), pull.wanted, pull.wanted.source
    standing = next(iter(entry_points(group="bdn.embedded", name="standing")), None)
    is_known = pull.offline or (isinstance(uri, HuggingFaceUri) and uri.commit is not None)
    # Only the mirror has the secrets, and a bucket would have to be listed completely.
    is_asked = isinstance(uri, HuggingFaceUri) and wanted.auth is None
    if settings.database_url or standing is None or not (is_known or is_asked):
        return None
    if not is_known:
        from bdn.sources.huggingface import revision  # noqa: F401, PLC0415 - imported before the clock starts
    began = time.perf_counter()
    held = held_in(settings.usual_database, wanted, DEFAULT_ORGANISATION, is_newest=True)
    if held is None or held[0].manifest is None:
        return None
    (mirrored, mirrored_at), manifest = held, held[0].manifest
    commit = mirrored.resolved_revision or ""
    if pull.hub is not None and not pull.hub.has_tree(commit):
        return None
    look: Callable[..., StageMount | None] = standing.load()  # the agent's check of a directory, without an agent
    location, destination = wanted.mount_location, pull.at(commit)
    mount = look(settings.data_dir, DEFAULT_ORGANISATION, location, manifest, destination, link=pull.link)
    if mount is None:
        return None
    if not is_known and isinstance(uri, HuggingFaceUri):
        now = _revision_now(uri, settings)
        if now is None or now != mirrored.resolved_revision:
            return None
    if pull.hub is not None:
        pull.hub.write_ref(commit)
    note_use_in(settings.usual_database, manifest.removeprefix("b3:"), time.time())
    if pull.offline:
        say(f"offline: {as_mirrored(mirrored, mirrored_at)}")
    return result_of(pull, mirrored, mount, transferred=0, seconds=time.perf_counter() - began)


def _revision_now(uri: HuggingFaceUri, settings: MirrorSettings) -> str | None:
    """The upstream's commit, requested once. None if unknown: the mirror then requests it, and reports the problem."""
    from bdn.sources.huggingface.revision import commit_now  # noqa: PLC0415 - not needed for an offline pull

    return commit_now(uri, settings.upstreams)
