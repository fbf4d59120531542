"""A training job that a user pushes with the unmodified truss, and that runs as a pod."""

import asyncio
import shutil
from typing import Final

from bdn.net.api_clients import MirrorClient
from tests.kubernetes.api import Json, until
from tests.kubernetes.cluster import MIRROR, Cluster
from tests.kubernetes.images import BDN
from tests.support.mirror.training_jobs import TERMINAL
from tests.support.services.cluster import Cluster as Services
from tests.support.services.training import CLIENTS, User, ended

_SCRIPT: Final = """
import hashlib, os, pathlib
for path in sorted(pathlib.Path("/app/model").rglob("*")):
    if path.is_file():
        print("FILE", path, hashlib.sha256(path.read_bytes()).hexdigest())
try:
    open("/app/model/config.json", "w")
    print("WRITTEN")
except OSError:
    pass
folder = pathlib.Path(os.environ["BT_CHECKPOINT_DIR"], "checkpoint-1")
folder.mkdir()
(folder / "model.pt").write_text("1")
"""


class _Installed(Services):
    """The mirror of the cluster, for a user outside of it."""

    @property
    def url(self) -> str:
        return MIRROR


async def trained(cluster: Cluster) -> Json:
    if not CLIENTS.exists() or shutil.which("git") is None:
        return {}
    services = _Installed(cluster.folder, {"BDN_TOKEN": cluster.token}, is_forked=False)
    user = User(services, services.shell("user"))
    user.shell.root.mkdir()

    def push() -> str:
        return user.start(
            "demo",
            "python3 script.py",
            files={"script.py": _SCRIPT},
            image=f"base_image={BDN!r}",
            weights='WeightsSource(source="hf://org/model@main", mount_location="/app/model")',
            runtime="checkpointing_config=CheckpointingConfig(enabled=True)",
        )

    job = await asyncio.to_thread(push)

    async def is_over() -> bool:
        return (await asyncio.to_thread(ended, user, job))[0] in TERMINAL

    await until(is_over)
    async with MirrorClient(MIRROR, cluster.token) as client:
        checkpoints = (await client.checkpoints("demo")).items
    pods = await cluster.api.pods("training", labelSelector=f"bdn.dev/job={job}")
    status, reason = await asyncio.to_thread(ended, user, job)
    return {
        "status": status,
        "reason": reason,
        "log": await asyncio.to_thread(user.logs, job),
        "checkpoints": [each.source for each in checkpoints],
        "pods": [pod["status"]["phase"] for pod in pods],
    }
