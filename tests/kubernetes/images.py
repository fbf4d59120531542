"""An image of one static busybox, as ``docker save`` writes it: it is the pause container of pods, and what tests run."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

NAME = "localhost/busybox:1"


def write_image(busybox: Path, out: Path) -> None:
    program = busybox.read_bytes()
    layer = _tar({"bin": None, "tmp": None, "bin/busybox": program, "bin/sh": program})
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/bin/busybox", "sleep", "1000000"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    text = json.dumps(config).encode()
    name = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [NAME], "Layers": ["layer.tar"]}]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(_tar({name: text, "layer.tar": layer, "manifest.json": json.dumps(manifest).encode()}))


def _tar(files: dict[str, bytes | None]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.mode, entry.size = 0o755, len(content or b"")
            entry.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            archive.addfile(entry, io.BytesIO(content or b""))
    return out.getvalue()
