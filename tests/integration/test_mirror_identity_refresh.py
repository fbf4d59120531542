"""Credentials end in the middle of a long copy: they are renewed, seldom, and no byte is lost."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import answer, stall
from tests.doubles.request_log import LoggedRequest, RequestLog
from tests.doubles.s3 import S3Bucket
from tests.doubles.sts import sts_error
from tests.support.content.cloud_identity import Clouds, aws_assume_role, aws_oidc, gcp_oidc, trusted_mirror
from tests.support.mirror.service import Json

pytest_plugins = ("tests.support.mirror.fixtures", "tests.support.content.cloud_fixtures")

CHUNKS = 5
CONTENT = GeneratedContent(CHUNKS * CHUNK_SIZE)
Wanted = Callable[[str], Json]


def each_range(log: RequestLog, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do this whenever a range of the big file is asked for, before it is answered."""
    add = log.add

    def adding(request: LoggedRequest) -> None:
        if "big.bin" in request.target and request.method == "GET" and "range" in request.headers:
            act()
        add(request)

    monkeypatch.setattr(log, "add", adding)


@pytest.mark.parametrize("wanted", [aws_oidc, aws_assume_role])
async def test_a_copy_that_takes_hours_takes_the_role_again(
    clouds: Clouds, bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: Wanted
) -> None:
    content = bytes(CONTENT.read(0, CONTENT.size))
    bucket.put({"w/big.bin": content})
    each_range(clouds.s3.log, lambda: clouds.clock.advance(25 * 60), monkeypatch)
    async with trusted_mirror(clouds, tmp_path, transfers=1) as mirror:
        document = await mirror.ready(wanted(f"s3://{bucket.name}/w"))
        assert await mirror.tree(document["sources"][0]["manifest"]) == {"big.bin": content}
    # An hour is over at every third request of 25 minutes each. That one is refused, the role is taken again, and then one
    # more is made: so each session reads two ranges, and the next one begins with the third request.
    refused = [request for request in clouds.s3.log.find("big.bin") if request.status == 403]
    assert len(clouds.sts.sessions) == len(refused) + 1
    assert len(clouds.sts.sessions) == CHUNKS // 2 + 1
    assert len({session.account.access_key_id for session in clouds.sts.sessions}) == len(clouds.sts.sessions)


async def test_a_copy_that_takes_hours_gets_another_token(
    clouds: Clouds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(CONTENT.read(0, CONTENT.size))
    clouds.gcs.bucket("weights").put({"w/big.bin": content})
    each_range(clouds.gcs.log, lambda: clouds.clock.advance(25 * 60), monkeypatch)
    async with trusted_mirror(clouds, tmp_path, transfers=1) as mirror:
        document = await mirror.ready(gcp_oidc("gs://weights/w", clouds.gcs.account.email))
        assert await mirror.tree(document["sources"][0]["manifest"]) == {"big.bin": content}
    refused = [request for request in clouds.gcs.log.find("big.bin") if request.status == 401]
    assert len(clouds.google.issued) == len(refused) + 1 == CHUNKS // 2 + 1


async def test_a_renewal_that_fails_for_a_while_does_not_end_the_copy(
    clouds: Clouds, bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(CONTENT.read(0, 3 * CHUNK_SIZE))
    bucket.put({"w/big.bin": content})
    each_range(clouds.s3.log, lambda: clouds.clock.advance(25 * 60), monkeypatch)
    clouds.sts.script.add(answer(503, {}, sts_error("ServiceUnavailable")), skip=1, times=3)
    async with trusted_mirror(clouds, tmp_path, transfers=1) as mirror:
        await mirror.ready(aws_oidc(f"s3://{bucket.name}/w"))
    assert len(clouds.sts.sessions) == 2
    assert clouds.sts.log.count() == 2 + 3


async def test_a_role_that_is_withdrawn_in_the_middle_ends_the_copy_and_publishes_nothing(
    clouds: Clouds, bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put({"w/big.bin": bytes(CONTENT.read(0, 3 * CHUNK_SIZE))})

    def withdraw() -> None:
        clouds.sts.roles.clear()
        clouds.clock.advance(25 * 60)

    each_range(clouds.s3.log, withdraw, monkeypatch)
    async with trusted_mirror(clouds, tmp_path, transfers=1) as mirror:
        error = await mirror.failed(aws_oidc(f"s3://{bucket.name}/w"))
    assert error["code"] == "AUTH_REQUIRED"
    assert "trust policy" in error["message"]


async def test_many_files_at_once_take_the_role_once(clouds: Clouds, bucket: S3Bucket, tmp_path: Path) -> None:
    bucket.put({f"w/{number:03}.bin": f"weights {number}".encode() for number in range(120)})
    async with trusted_mirror(clouds, tmp_path) as mirror, asyncio.TaskGroup() as group:
        for place in ("a", "b"):
            group.create_task(mirror.ready(aws_oidc(f"s3://{bucket.name}/w", f"/{place}")))
    assert len(clouds.sts.sessions) == 2  # one for each mirror
    assert len({session.name for session in clouds.sts.sessions}) == 2


async def test_a_mirror_is_canceled_while_a_token_service_is_silent(
    clouds: Clouds, bucket: S3Bucket, tmp_path: Path
) -> None:
    clouds.gcs.bucket("weights").put({"w/a.bin": b"weights"})
    clouds.google.script.add(stall(), times=None)
    clouds.sts.script.add(stall(), times=None)
    async with trusted_mirror(clouds, tmp_path) as mirror:
        for wanted, log in (
            (gcp_oidc("gs://weights/w", clouds.gcs.account.email), clouds.google.log),
            (aws_oidc(f"s3://{bucket.name}/w"), clouds.sts.log),
        ):
            begun = await mirror.begin(wanted)
            await asyncio.to_thread(log.wait_for, "/")
            await mirror.http.post(f"/mirror/{begun['id']}/cancel")
            assert (await mirror.ended(begun["id"]))["status"] == "CANCELED"
