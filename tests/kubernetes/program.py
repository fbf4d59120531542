"""``python -m tests.kubernetes.program FOLDER BIN BASE``: a cluster of two nodes, and all journeys on it. Run it in the namespaces of ``rig.sh``.

``FOLDER/report.json`` has a document for each journey.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from tests.doubles.hub import Hub
from tests.kubernetes.api import Api, Json
from tests.kubernetes.cluster import HOST, Cluster, install
from tests.kubernetes.images import write_bdn, write_busybox
from tests.kubernetes.journeys import travel
from tests.kubernetes.nodes import HERE, Node


async def start(folder: Path, binaries: Path, base: Path) -> list[Node]:
    """The control plane and, once images are made, the nodes."""
    up = await asyncio.create_subprocess_exec("bash", HERE / "up.sh", folder, binaries)
    write_busybox(Path("/bin/busybox"), folder / "images/busybox.tar")
    await asyncio.to_thread(write_bdn, base, folder / "image", folder / "images/bdn.tar")
    assert await up.wait() == 0, "the cluster did not come up"
    nodes = [Node(number, folder, binaries) for number in (1, 2)]
    for node in nodes:
        await node.start()
    return nodes


async def run(folder: Path, binaries: Path, base: Path) -> Json:
    began = time.monotonic()
    nodes = await start(folder, binaries, base)
    with Hub(host=HOST) as hub:
        async with Api(folder / "kubeconfig") as api:
            cluster = Cluster(folder, binaries, base, hub, api, nodes)
            await install(cluster)
            up = time.monotonic() - began
            report = await travel(cluster)
            return {"up_seconds": up, "seconds": time.monotonic() - began, **report}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    (place / "report.json").write_text(
        json.dumps(asyncio.run(run(place, Path(sys.argv[2]), Path(sys.argv[3]))), indent=1)
    )
