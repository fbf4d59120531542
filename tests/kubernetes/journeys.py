from tests.kubernetes.api import *
from tests.kubernetes.cluster import *
async def travel(cluster):
    cluster.hub.repo("org/model").commit({"config.json": b"{}", "deep/model.safetensors": bytes(range(256)) * 40_000})
    await cluster.run_inline("inline", {"source": "hf://org/model@main"}, node=cluster.nodes[0])
    async with asyncio.timeout(60):
        try:
            r = await cluster.reads("inline")
        except Exception as e:
            r = {"e": repr(e)}
    return {"r": r, "p": [n.published() for n in cluster.nodes], "ev": await cluster.api.events("inline"), "log": await cluster.driver_log(cluster.nodes[0])}
