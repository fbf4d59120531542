"""A client of S3 that uploads an archive, as truss does: with what ``/v1/blobs/credentials/train`` answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import boto3
import httpx2
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import ClientError

from bdn.mirror.jobs.archives import Archives
from tests.support.mirror.service import Json, MirrorUnderTest
from tests.support.network.service import listening

ONCE = Config(retries={"total_max_attempts": 1})


def archives_of(mirror: MirrorUnderTest) -> Archives:
    found: Archives = mirror.service.api.state.provided[Archives]
    return found


@dataclass
class Upload:
    """One object to upload; ``url`` is the mirror's."""

    url: str
    document: Json

    @property
    def key(self) -> str:
        return str(self.document["s3_key"])

    @property
    def path(self) -> str:
        return f"/uploads/{self.document['s3_bucket']}/{self.key}"

    @property
    def token(self) -> str:
        return str(self.document["creds"]["aws_session_token"])

    @property
    def object(self) -> Json:
        """The arguments of the client's calls that name the object."""
        return {"Bucket": self.document["s3_bucket"], "Key": self.key}

    @cached_property
    def client(self) -> Any:
        return boto3.session.Session().client("s3", config=ONCE, **self.document["creds"])

    async def upload_file(self, path: Path) -> None:
        """As truss does."""
        resource = boto3.session.Session().resource("s3", **self.document["creds"])
        target = resource.Object(self.document["s3_bucket"], self.key)
        config = TransferConfig(max_concurrency=10, use_threads=True)
        await asyncio.to_thread(target.upload_file, str(path), Config=config)

    async def ask(self, call: str, **given: Any) -> Json:
        """A call of boto3's client. Raises ``ClientError``."""
        answer: Json = await asyncio.to_thread(getattr(self.client, call), **self.object, **given)
        return answer

    async def refusal(self, call: str, **given: Any) -> tuple[int, str, str]:
        """Status, code and message of a call that fails."""
        try:
            answered = await self.ask(call, **given)
        except ClientError as error:
            facts: Json = dict(error.response)
            return facts["ResponseMetadata"]["HTTPStatusCode"], facts["Error"]["Code"], facts["Error"]["Message"]
        raise AssertionError(answered)

    async def part(self, number: int, content: bytes, **given: Any) -> Json:
        """The part as a list of parts names it."""
        answer = await self.ask("upload_part", UploadId=self.key, PartNumber=number, Body=content, **given)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    async def complete(self, *parts: Json) -> Json:
        return await self.ask("complete_multipart_upload", UploadId=self.key, MultipartUpload={"Parts": list(parts)})


@asynccontextmanager
async def uploads_of(mirror: MirrorUnderTest) -> AsyncIterator["Uploads"]:
    """The mirror's API on a port, with uploads to begin."""
    async with (
        listening(mirror.service.api) as url,
        httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60) as http,
    ):
        yield Uploads(url, http)


@dataclass
class Uploads:
    url: str
    http: httpx2.AsyncClient

    async def begin(self, bearer: str | None = None, **headers: str) -> Upload:
        headers |= {"Authorization": f"Bearer {bearer}"} if bearer else {}
        answer = await self.http.get("/v1/blobs/credentials/train", headers=headers)
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store"), answer.text
        return Upload(self.url, answer.json())
