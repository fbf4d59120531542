"""What must hold of a cache directory, looked at with plain reads: at the moment of a kill, and once an agent stands on it."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bdn.core.chunk import Digest
from tests.support.agent.cache_world import World, digest_of_bytes
from tests.support.agent.local_node import LocalNode, content_files
from tests.support.content.trees import tree


@dataclass
class Wound:
    """Contents that somebody took from a READY stage while no agent was there, and those whose bytes its view shares."""

    taken: set[Digest] = field(default_factory=set)
    torn: set[Digest] = field(default_factory=set)


def ready_on_disk(cache: Path) -> dict[str, list[Digest]]:
    """READY stages as recorded, whether anybody has heard of them or not, and what they name."""
    records = [json.loads(path.read_bytes()) for path in (cache / "stages").glob("*.json")]
    return {
        record["id"]: [Digest.parse(mount["manifest"]) for mount in record["mounts"]]
        for record in records
        if record["state"] == "READY"
    }


def wrong_files(cache: Path) -> list[str]:
    """Whole files that are not what their names say."""
    return [name for name, path in content_files(cache).items() if digest_of_bytes(path.read_bytes()).hex != name]


def broken_views(
    cache: Path, world: World, ready: Mapping[str, tuple[Digest, ...]], wounds: Mapping[str, Wound]
) -> list[str]:
    """READY stages of which a job would not find every file, with the right bytes, and nothing else.

    A file that was torn by somebody else is there and may be wrong, until the stage is mended.
    """
    found = []
    for stage_id, manifests in ready.items():
        torn = wounds.get(stage_id, Wound()).torn
        for index, manifest in enumerate(manifests):
            place = cache / "mounts" / stage_id / f"m{index}"
            shown, wanted = tree(place) if place.is_dir() else {}, world.files[manifest]
            excused = {path for path, content in wanted.items() if torn and digest_of_bytes(content) in torn}
            right = {path: content for path, content in wanted.items() if path not in excused}
            if shown.keys() != wanted.keys() or right.items() - shown.items():
                found.append(f"{stage_id}: {manifest} is not what a job should see")
    return found


def differences(node: LocalNode, cache: Path, acknowledged: Collection[str], wounds: Mapping[str, Wound]) -> list[str]:
    """Where index, ledger, leases and disk disagree. No stage may be at work."""
    index, whole = node.cache.index, content_files(cache)
    manifests = {path.name.split(".")[0] for path in (cache / "manifests").iterdir()}
    held = {digest.hex for digest in index.manifests()}
    sizes = {name: path.stat().st_size for name, path in whole.items()}
    parts = {path.name.split(".")[0] for path in (cache / "filling").iterdir()}
    named = {content: size for digest in index.manifests() for content, size in index.contents_of(digest).items()}
    begun = {content.hex: size for content, size in named.items() if content.hex in parts}
    ledger = index.ledger
    facts = [
        ("the index holds the manifests on disk", held == manifests),
        ("what is committed is what is whole", ledger.committed_bytes == sum(sizes.values())),
        ("every whole file is committed", all(ledger.is_committed(Digest(name)) for name in whole)),
        ("every part is some manifest's", parts <= begun.keys()),
        ("what is reserved is what was begun", ledger.reserved_bytes == sum(begun.values())),
        ("nothing is written beside", node.disk.unnamed.size == 0),
        ("no file is left aside", not list((cache / "files").glob("??/.*"))),
    ]
    found = [fact for fact, holds in facts if not holds]
    ready = {stage.record.id: stage.record for stage in node.stages.registry.all() if stage.record.state == "READY"}
    found += [f"stage {stage_id} was READY and is lost" for stage_id in acknowledged if stage_id not in ready]
    for record in ready.values():
        excused = wounds.get(record.id, Wound()).taken if record.error else set()  # it says that it could not be mended
        for manifest in record.manifests:
            lacking = {content for content in index.contents_of(manifest) if not ledger.is_committed(content)}
            if not index.leases.is_leased(manifest) or lacking - excused:
                found.append(f"{manifest} of stage {record.id} is not leased or not whole")
    standing = {path.name for path in (cache / "views").iterdir()}
    found += [f"a view of nobody: {name}" for name in standing - ready.keys()]
    return found
