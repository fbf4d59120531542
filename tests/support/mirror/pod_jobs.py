"""A mirror whose training jobs run as pods of a Kubernetes that a test moves."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2

from bdn.mirror.db import projects
from tests.doubles.kubernetes import Issuer, write_clusters
from tests.doubles.kubernetes_api import NAMESPACE, TOKEN, ApiServer
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test
from tests.support.mirror.training_jobs import JobClient
from tests.support.network.authority import new_authority

OPERATOR: Final = "the-operator-of-the-settings"
CLUSTER: Final = "c"
IMAGE: Final = {"base_image": "python:3.11"}


@contextmanager
def kubernetes(folder: Path, *nodes: str) -> Iterator[ApiServer]:
    """An API server with an authority of its own. Its files, and the mirror's token, are in the folder."""
    (folder / "api").mkdir(exist_ok=True)
    (folder / "api/token").write_text(TOKEN)
    with ApiServer(new_authority(folder / "api", "localhost").server, *nodes) as api:
        yield api


def cluster_file(folder: Path, issuer: Issuer, api: ApiServer, url: str = "http://mirror:8460", **jobs: str) -> Path:
    """The file ``BDN_KUBERNETES`` of one cluster, whose namespace for jobs is of the organisation ``default``."""
    given = {"image": "bdn", "url": url, "api": api.url, "ca": f"{folder}/api/authority.pem"}
    given |= {"token_file": f"{folder}/api/token", **jobs}
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items())
    namespaces = (
        f'[namespaces.{NAMESPACE}]\norganisation = "default"\njobs = true\n[namespaces.lab]\norganisation = "default"\n'
    )
    gpus = '[jobs.gpus.H100]\nnode_labels = {"nvidia.com/gpu.product" = "H100"}\n'
    table = f"{issuer.cluster(agents='bdn/agent')}[jobs]\n{lines}{gpus}{namespaces}"
    return write_clusters(folder / "kubernetes.toml", **{CLUSTER: table})


@dataclass
class PodJobs:
    """A mirror, a Kubernetes, and a user with the project ``llama``."""

    mirror: MirrorUnderTest
    api: ApiServer
    issuer: Issuer
    client: JobClient

    async def looked(self, times: int = 1) -> None:
        """The controller looks at everything."""
        for _ in range(times):
            controller = self.mirror.service.controller
            await controller.look()
            for pods in controller.pods:
                await controller.look_at(pods)

    async def placed(self, request: Json) -> str:
        """A new job, once it has its ranks."""
        job = await self.client.create({"image": IMAGE, **request})
        await self.looked(2)
        return job

    async def deployed(self, request: Json) -> str:
        """The same, once its pods are on nodes."""
        job = await self.placed(request)
        await self.looked(2)
        assert await self.client.status(job) == "DEPLOYING", await self.client.job(job)
        return job

    async def running(self, request: Json) -> str:
        """The same, once its commands run."""
        job = await self.deployed(request)
        self.api.runs(job, *range(len((await self.client.job(job))["bdn"]["ranks"])))
        await self.looked(3)
        assert await self.client.status(job) == "RUNNING", await self.client.job(job)
        return job

    def bearing(self, run: str, rank: int = 0, **changes: Any) -> dict[str, str]:
        """What a container of BDN in a rank's pod sends."""
        pod = self.api.pod(run, rank)
        assert pod is not None
        return {"Authorization": f"Bearer {self.issuer.token(NAMESPACE, pod=pod['metadata']['uid'], **changes)}"}

    async def spec(
        self, run: str, rank: int = 0, bearer: dict[str, str] | None = None, **changes: str
    ) -> httpx2.Response:
        pod = self.api.pod(run, rank)
        assert pod is not None
        params = {"node": pod["spec"]["nodeName"], "boot_id": pod["metadata"]["uid"], **changes}
        return await self.mirror.http.get(
            f"/runs/{run}/{rank}", params=params, headers=bearer or self.bearing(run, rank)
        )


@asynccontextmanager
async def pod_jobs(
    folder: Path, *nodes: str, jobs: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[PodJobs]:
    with Issuer() as issuer, kubernetes(folder, *nodes) as api:
        file = await asyncio.to_thread(cluster_file, folder, issuer, api, **(jobs or {}))
        given = {"auth": "token", "token": OPERATOR, "kubernetes": file, "work": False, **settings}
        async with mirror_under_test(folder / "mirror", bearer=OPERATOR, **given) as mirror:
            database = mirror.service.requests.database
            async with database.write() as session:
                project = (await projects.project(session, "default", "Default", "llama", database.now())).id
            yield PodJobs(mirror, api, issuer, JobClient(mirror, project))
