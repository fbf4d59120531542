"""The stage records on disk, and the events about each: started, failed, renewed or ended."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from bdn.core.chunk import Digest
from bdn.core.errors import Fact
from bdn.core.events import Ending, Event
from bdn.disk.durable import disk_errors, write_at_once, write_durably
from node_agent.cache.cache_events import about_holder
from node_agent.disk.places import Places
from node_agent.stage.stage import StageRecord


@dataclass(frozen=True)
class StageRecords:
    places: Places

    def save(self, record: StageRecord) -> None:
        path = self.places.stage(record.id)
        with disk_errors(path):
            write_durably(path, record.model_dump_json().encode())

    def note(self, record: StageRecord) -> None:
        """Write without a sync, for a stage that only begins; a warm stage would mostly wait for the disk.

        Survives the process, not a power cut: then the waiting client gets an error and requests again. Raises
        ``DiskFailedError``.
        """
        path = self.places.stage(record.id)
        with disk_errors(path):
            write_at_once(path, record.model_dump_json().encode())

    def forget(self, stage_id: str) -> None:
        with disk_errors(self.places.stage(stage_id)):
            self.places.stage(stage_id).unlink(missing_ok=True)

    def load_all(self) -> Iterator[StageRecord]:
        """Yields the valid records; moves invalid ones to the quarantine."""
        with disk_errors(self.places.stages):
            for path in sorted(self.places.stages.iterdir()):
                if path.suffix != ".json":
                    path.unlink()  # an interrupted write; the previous record, if any, is intact
                    continue
                try:
                    yield StageRecord.model_validate_json(path.read_bytes())
                except ValueError:
                    path.rename(self.places.quarantine / path.name)


Decision = Literal["arrived", "failed", "not_mended", "renewed", "resumed", "ended"]


def decisions(kind: Decision, record: StageRecord, ending: Ending | None = None) -> list[Event]:
    """One event per manifest, with facts from the record."""
    return [
        about_holder(kind, manifest, record.holder, _facts(kind, record, manifest, ending))
        for manifest in record.manifests
    ]


def _facts(kind: Decision, record: StageRecord, manifest: Digest, ending: Ending | None) -> Mapping[str, Fact]:
    match kind:
        case "arrived":  # over all mounts of the manifest
            came = [mount.bytes_from for mount in record.mounts if mount.digest == manifest]
            return {tier: sum(getattr(one, tier) for one in came) for tier in ("node", "cluster", "mirror")}
        case "failed" | "not_mended":
            error = record.error
            code, problem = (error.code, error.message) if error else ("INTERNAL", "it is not known why")
            return {"code": code, "problem": problem}
        case "renewed":
            return {"expires_at": record.expires_at}
        case "resumed":
            return {"state": record.state}
        case "ended":
            return {"ending": ending, "expires_at": record.expires_at}
