"""Detects an intact earlier pull without an agent, so that a repeated ``bdn pull`` has nothing else to do.

Imports a tenth of an agent's modules, takes no locks, and may run beside an agent.
"""

import time
from contextlib import suppress
from pathlib import Path

from bdn.core.chunk import Digest
from bdn.core.errors import BdnError
from bdn.wire.stage_schema import BytesFrom, StageMount, stage_id_of
from node_agent.cache.records import CacheFiles, ManifestRecords
from node_agent.disk.cache_format import check_format
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles, seen
from node_agent.settings import load_settings
from node_agent.stage.pulled import PulledDirectories
from node_agent.stage.stage import StageRecord, StageRegistry
from node_agent.stage.view.destination import resolved


def standing_pull(
    data_dir: Path, organisation: str, mount_location: str, manifest: str, destination: Path, *, link: bool
) -> StageMount | None:
    """The intact pull of this manifest at ``destination``, which is recorded as used. Blocking.

    The result equals an agent's answer to a repeated pull. Returns None if an agent has to decide: the directory is
    empty, foreign or damaged, or records are missing, wrong or of another version.

    Raises ``SettingsError``: the agent's settings are invalid.
    """
    places = Places(load_settings(data_dir=data_dir).effective_cache_dir)
    records = ManifestRecords(places)
    with suppress(BdnError, OSError, ValueError):
        check_format(places)
        path = resolved(destination)
        stage_id = stage_id_of(f"pull:{path}", organisation, {mount_location: manifest})
        record = StageRecord.model_validate_json(places.stage(stage_id).read_bytes())
        digest = Digest.parse(manifest)
        held = records.manifest(digest)
        (mount,) = record.mounts
        if held is None or (record.id, record.destination, mount.manifest) != (stage_id, path, manifest):
            return None
        files = WholeFiles(places)
        looks = {content: files.look(content) for content in held.contents}
        files.restore({content: seen(look) for content, look in looks.items() if look}, [held])
        directories = PulledDirectories(StageRegistry(), CacheFiles(files, records))
        if not directories.is_standing(record, link=link):
            return None
        with suppress(BdnError):  # a read-only disk
            records.touch(digest, time.time())
        size = held.bytes_total
        found = {"files_total": len(held.files), "bytes_total": size, "bytes_from": BytesFrom(node=size)}
        return StageMount(**mount.model_dump() | found, path=str(path), bytes_done=size)
    return None
