"""What training jobs of tests do: scripts, the weights that they read, and what their output must say."""

import hashlib
from typing import Final

from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Server

_MODEL: Final = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 4096}
DATA: Final = {"a.jsonl": b"[1]\n" * 1000, "b.jsonl": b"[2]\n"}
WEIGHTS: Final = (
    'WeightsSource(source="hf://org/model", mount_location="/app/models/org/model"), '
    'WeightsSource(source="s3://data/train", mount_location="/app/data")'
)
_MOUNTED: Final = {"/app/models/org/model": _MODEL, "/app/data": DATA}
READING: Final = """
import hashlib, os, subprocess
for place in ("/app/models/org/model", "/app/data"):
    for folder, _, names in sorted(os.walk(place)):
        for name in sorted(names):
            path = os.path.join(folder, name)
            print("FILE", path, hashlib.sha256(open(path, "rb").read()).hexdigest())
            for refused in (lambda: open(path, "ab"), lambda: os.remove(path), lambda: open(folder + "/new", "w")):
                try:
                    refused()
                    print("WRITTEN", path)
                except OSError:
                    pass
    for namespace in ([], ["unshare", "--map-root-user", "--mount"]):
        for options in ("remount,rw", "remount,bind,rw"):
            if subprocess.run([*namespace, "mount", "-o", options, place], capture_output=True).returncode == 0:
                print("REMOUNTED", place)
print("UID", os.getuid())
"""
CHECKPOINTS: Final = "checkpointing_config=CheckpointingConfig(enabled=True)"
RESUMED: Final = """
import os, pathlib
found = sorted(pathlib.Path(os.environ["BT_LOAD_CHECKPOINT_DIR"]).rglob("model.pt"))
step = int(found[-1].read_text()) + 1 if found else 1
folder = pathlib.Path(os.environ["BT_CHECKPOINT_DIR"], f"checkpoint-{step}")
folder.mkdir()
(folder / "model.pt").write_text(str(step))
print("step", step)
"""


def resuming(project: str, checkpoints: str = CHECKPOINTS) -> str:
    """The runtime of a job that writes checkpoints and loads the newest of its project."""
    newest = f"checkpoints=[BasetenCheckpoint.from_latest_checkpoint(project_name={project!r})]"
    return f"{checkpoints}, load_checkpoint_config=LoadCheckpointConfig(enabled=True, {newest})"


def publish_weights(hub: Hub, s3: S3Server) -> None:
    """The sources of ``WEIGHTS``."""
    hub.repo("org/model").commit(_MODEL)
    s3.bucket("data", public=True).put({f"train/{name}": content for name, content in DATA.items()})


def check_read_only(said: str) -> None:
    """``said``: the output of ``READING`` as truss prints it, in lines of any length."""
    said = said.replace(" ", "")
    for place, files in _MOUNTED.items():
        for name, content in files.items():
            assert f"FILE{place}/{name}{hashlib.sha256(content).hexdigest()}" in said
    assert "UID0" in said
    assert "WRITTEN" not in said
    assert "REMOUNTED" not in said
