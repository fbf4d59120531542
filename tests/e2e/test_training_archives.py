"""Archives of training jobs, uploaded by truss and by a client of S3: run, downloaded, repeated, refused, and one of a gigabyte."""

import asyncio
import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx2
import pytest

from bdn.core.chunk import CHUNK_SIZE
from tests.support.agent.mounts import needs_mounts, unmounting
from tests.support.agent.runs import needs_bwrap
from tests.support.content.noise import MIB, noise
from tests.support.mirror.training_jobs import runtime, spec
from tests.support.mirror.uploads import Upload, Uploads
from tests.support.promises.tally import FULL
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Process, wait_until
from tests.support.services.training import CLIENTS, User, agent, ended, left_over, over

LARGE: Final = 10**9
STREAMS: Final = 10  # as many as truss has
MOST_MIB: Final = 256  # that the mirror takes more than for a small archive: each part under way twice, and some
needs_truss = pytest.mark.skipif(not CLIENTS.exists(), reason="truss is not installed; make test installs it")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with unmounting(tmp_path):
        yield Cluster(tmp_path, {})


def client_of(cluster: Cluster) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=cluster.url, trust_env=False, timeout=60)


async def job_with(http: httpx2.AsyncClient, upload: Upload) -> str:
    """The id of a job with this archive."""
    made = await http.post("/v1/training_projects", json={"training_project": {"name": "archives"}})
    project = made.json()["training_project"]["id"]
    artifacts = [{"s3_bucket": upload.object["Bucket"], "s3_key": upload.key}]
    request = spec(runtime=runtime(start_commands=["true"], artifacts=artifacts))
    answer = await http.post(f"/v1/training_projects/{project}/jobs", json={"training_job": request})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["training_job"]["id"])


@needs_bwrap
@needs_mounts
@needs_truss
@pytest.mark.production
def test_archive_of_truss__is_downloaded_as_it_was_and_outlives_its_job(cluster: Cluster) -> None:
    files = {"data.txt": noise(10**7).hex(), "note.txt": "text"}  # 20 MB: several parts
    digest = hashlib.sha256(files["data.txt"].encode()).hexdigest()
    with cluster.mirror(), agent(cluster) as shell, cluster.http() as http:
        user = User(cluster, shell)

        def job_after(*words: str) -> str:
            """The newest job, which has printed the digest; after a command of truss."""
            done = user.truss(*words)
            assert done.code == 0, done.out + done.err
            job = str(http.post("/v1/training_jobs/search", json={}).json()["training_jobs"][0]["id"])
            assert ended(user, job) == ("COMPLETED", "")
            assert digest in user.logs(job)
            return job

        first = user.push("code", "sha256sum data.txt", files=files)
        second = job_after("recreate", "--job-id", first, "--tail")
        path = f"/v1/training_projects/{user.job(first)['training_project_id']}/jobs"
        assert http.delete(f"{path}/{first}").status_code == 200
        third = job_after("recreate", "--job-id", second, "--tail")
        assert len({first, second, third}) == 3
        done = user.truss("download", "--job-id", third, "--target-directory", str(cluster.root / "got"))
        assert done.code == 0, done.out + done.err
        (got,) = (cluster.root / "got").iterdir()
        assert {name: (got / name).read_text() for name in files} == files
        assert (got / "config.py").exists()


def tar_with(name: str, link: str = "") -> bytes:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = (tarfile.SYMTYPE, link) if link else (tarfile.REGTYPE, "")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(entry)
    return packed.getvalue()


@needs_bwrap
@needs_mounts
async def test_archive__with_a_name_or_a_link_that_leads_out__fails_its_job_and_leaves_nothing(
    cluster: Cluster,
) -> None:
    with cluster.mirror(), agent(cluster) as shell:
        user = User(cluster, shell)
        async with client_of(cluster) as http:
            for name, link, problem in (
                ("../escaped", "", "'../escaped' leads out of the workspace"),
                ("escaped", "../../escaped", "'escaped' links to '../../escaped', out of the workspace"),
                ("escaped", str(shell.data), f"'escaped' links to '{shell.data}', out of the workspace"),
            ):
                upload = await Uploads(cluster.url, http).begin()
                await upload.ask("put_object", Body=tar_with(name, link))
                job = await job_with(http, upload)
                status, reason = over(user, job)
                assert status == "DEPLOY_FAILED"
                assert reason.endswith(f"the job's archive is refused: {problem} [INVALID_REQUEST]")
        wait_until(lambda: not left_over(shell), what="an empty node")
        assert not list(cluster.root.rglob("*escaped*"))


def content_of(number: int) -> bytes:
    """Of a part, from 1; no two are equal."""
    size = min(CHUNK_SIZE, LARGE - (number - 1) * CHUNK_SIZE)
    return number.to_bytes(8) + noise(8 * MIB)[8:size]


async def upload_in_parts(upload: Upload) -> str:
    """Upload ``LARGE`` bytes, in any order, and one part twice. Returns their SHA-256."""
    numbers = range(1, -(-LARGE // CHUNK_SIZE) + 1)
    order = [*numbers, numbers[1]]
    Random(20261129).shuffle(order)
    free = asyncio.Semaphore(STREAMS)
    await upload.ask("create_multipart_upload")

    async def sent(number: int) -> Any:
        async with free:
            return await upload.part(number, content_of(number))

    parts = {part["PartNumber"]: part for part in await asyncio.gather(*map(sent, order))}
    await upload.complete(*(parts[number] for number in numbers))
    whole = hashlib.sha256()
    for number in numbers:
        whole.update(content_of(number))
    return whole.hexdigest()


def most_mib(process: Process) -> int:
    """Memory that a process has taken at most."""
    lines = (line.split() for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return next(int(words[1]) for words in lines if words[0] == "VmHWM:") // 1024


@needs_truss
@pytest.mark.production
@pytest.mark.skipif(not FULL, reason="make fault: uploads a gigabyte")
async def test_archive_of_a_gigabyte__in_any_order_and_a_part_twice__takes_little_memory_and_is_downloaded_as_it_was(
    cluster: Cluster,
) -> None:
    with cluster.mirror() as process:
        async with client_of(cluster) as http:
            small, large = [await Uploads(cluster.url, http).begin() for _ in range(2)]
            await small.ask("put_object", Body=b"code")
            await job_with(http, small)
            before = most_mib(process)
            digest = await upload_in_parts(large)
            job = await job_with(http, large)
        assert most_mib(process) - before < MOST_MIB
        user = User(cluster, cluster.shell("operator"))
        done = user.truss("download", "--job-id", job, "--no-unzip", "--target-directory", str(cluster.root / "got"))
        assert done.code == 0, done.out + done.err
        (got,) = (cluster.root / "got").iterdir()
        with got.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == digest
        assert most_mib(process) - before < MOST_MIB
