"""Content that stands in a cache directory, without an agent that put it there."""

from collections.abc import Mapping
from pathlib import Path

from bdn.core.manifest import Manifest
from bdn.wire.layout_form import Layout
from node_agent.cache.records import Held, ManifestRecords
from node_agent.disk.places import Places
from tests.support.agent.mirror import AgentMirror


def cached(root: Path, files: Mapping[str, bytes]) -> tuple[Places, Manifest]:
    """A directory that holds this tree, whole."""
    places = Places(root)
    places.make()
    return places, put(places, files)


def put(places: Places, files: Mapping[str, bytes], *, used: float = 1000.0) -> Manifest:
    """Another tree in the same directory, used at that time."""
    mirror = AgentMirror()
    manifest = mirror.publish(files)
    layout = Layout.parse(mirror.layouts[manifest.digest].to_json().encode())
    ManifestRecords(places).save(Held(manifest, layout), used)
    for entry in manifest.files:
        path = places.file(entry.digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(files[entry.path])
            path.chmod(0o444)
    return manifest
