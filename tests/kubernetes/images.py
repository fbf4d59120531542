"""Images as ``docker save`` writes them: one static busybox, and BDN's by the instructions of deploy/Dockerfile.

``python -m tests.kubernetes.images BASE`` makes the part of BDN's image that changes with the lock alone, in BASE, whose ``root`` is a Debian root with
Python: tests/kubernetes/README.md. Each run of the tests makes the other part from the checkout.
"""

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.kubernetes.dockerfile import (
    Instruction,
    config_of,
    copy_files,
    read_dockerfile,
    run_in,
    script_of,
    split_base,
)

BUSYBOX: Final = "localhost/busybox:1"
BDN: Final = "localhost/bdn:checkout"
_CHECKOUT: Final = Path(__file__).parents[2]
_UNUSED: Final = ("var/cache", "var/lib/apt", "usr/share/doc", "usr/share/man", "usr/share/locale", "root/.cache")


def write_busybox(busybox: Path, out: Path) -> None:
    program = busybox.read_bytes()
    layer = out.with_suffix(".layer")
    layer.parent.mkdir(parents=True, exist_ok=True)
    layer.write_bytes(_tar({"bin": None, "tmp": None, "bin/busybox": program, "bin/sh": program}))
    config = {"Entrypoint": ["/bin/busybox", "sleep", "1000000"], "Env": ["PATH=/bin"]}
    _write_archive(out, BUSYBOX, config, {layer: _sha256(layer)})
    layer.unlink()


def make_base(base: Path) -> None:
    """Run the first instructions in ``base/root``, and fetch what the others install. Needs a network."""
    instructions, _ = _read()
    workdir = _workdir(instructions)
    root, wheels = base / "root", base / "wheels"
    wheels.mkdir(exist_ok=True)
    for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()
    python = root / "usr/local/bin/python"
    python.unlink(missing_ok=True)
    python.symlink_to("/usr/bin/python3")
    shutil.rmtree(root / workdir.strip("/"), ignore_errors=True)
    copy_files(instructions, _CHECKOUT, root, workdir)
    run_in(root, script_of(instructions, workdir), wheels, network=True)
    build = "pip download -q --no-cache-dir -d /mnt --require-hashes -r /mnt/build.txt"
    shutil.copy(_CHECKOUT / "requirements/build.txt", wheels)
    run_in(root, build, wheels, network=True)
    for name in _UNUSED:
        shutil.rmtree(root / name, ignore_errors=True)
    _pack(root, base / "layer.tar")
    (base / "made.json").write_text(json.dumps({"of": _stamp(), "layer": _sha256(base / "layer.tar")}))


def why_no_base(base: Path) -> str:
    """What is wrong with the base, or an empty text."""
    made = base / "made.json"
    if not made.exists():
        return f"{base} has no base of BDN's image: tests/kubernetes/README.md"
    if json.loads(made.read_text())["of"] != _stamp():
        return f"the base in {base} was made with other requirements: run python -m tests.kubernetes.images {base}"
    return ""


def write_bdn(base: Path, work: Path, out: Path) -> None:
    """BDN's image of this checkout. ``work`` is a new folder for what the instructions write."""
    before, instructions = _read()
    workdir = _workdir(before)
    upper, root = work / "upper", work / "root"
    for folder in (upper, root, work / "upper.work"):
        folder.mkdir(parents=True)
    copy_files(instructions, _CHECKOUT, upper, workdir)
    script = script_of(instructions, workdir)
    run_in(root, script, base / "wheels", lower=base / "root", upper=upper, network=False)
    _pack(upper, work / "layer.tar")
    layers = {base / "layer.tar": json.loads((base / "made.json").read_text())["layer"]}
    layers[work / "layer.tar"] = _sha256(work / "layer.tar")
    _write_archive(out, BDN, config_of([*before, *instructions]), layers)


def _read() -> tuple[list[Instruction], list[Instruction]]:
    return split_base(read_dockerfile(_CHECKOUT / "deploy/Dockerfile"))


def _stamp() -> str:
    """What the base depends on."""
    base, _ = _read()
    files = [_CHECKOUT / "requirements" / name for name in ("runtime.txt", "build.txt")]
    return hashlib.sha256(repr(base).encode() + b"".join(file.read_bytes() for file in files)).hexdigest()


def _workdir(instructions: Sequence[Instruction]) -> str:
    return next(each.text for each in instructions if each.word == "WORKDIR")


def _pack(root: Path, out: Path) -> None:
    command = ["tar", "--one-file-system", "--numeric-owner", "--sort=name", "-C", str(root), "-cf", str(out), "."]
    subprocess.run(command, check=True, timeout=300)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write_archive(out: Path, name: str, config: Mapping[str, object], layers: Mapping[Path, str]) -> None:
    document = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in layers.values()]},
    }
    text = json.dumps(document).encode()
    of_config = f"{hashlib.sha256(text).hexdigest()}.json"
    names = [f"{digest}.tar" for digest in layers.values()]
    manifest = json.dumps([{"Config": of_config, "RepoTags": [name], "Layers": names}]).encode()
    with tarfile.open(out, mode="w") as archive:
        for path, member in zip(layers, names, strict=True):
            archive.add(path, member)
        for member, content in ((of_config, text), ("manifest.json", manifest)):
            _add(archive, member, content)


def _tar(files: Mapping[str, bytes | None]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            _add(archive, name, content)
    return out.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes | None) -> None:
    entry = tarfile.TarInfo(name)
    entry.mode, entry.size = 0o755, len(content or b"")
    entry.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
    archive.addfile(entry, io.BytesIO(content or b""))


if __name__ == "__main__":
    make_base(Path(sys.argv[1]).absolute())
