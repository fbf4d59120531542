"""A client of S3 uploads an archive in parts, and a job takes it: real boto3 against the API's own server."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from botocore.httpchecksum import AwsChunkedWrapper, Crc32Checksum

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.errors import NotFoundError
from bdn.core.pace.retry import StallPolicy
from bdn.core.source.uri import CheckpointUri
from bdn.mirror.jobs.archives import PART_RULE, UploadRefusedError
from bdn.mirror.jobs.pushes import GIVEN_UP_SECONDS
from bdn.net.chunk_server.receiving import BUFFERS
from bdn.wire.grants import PushGrant, UploadGrant
from tests.support.content.noise import MIB, noise
from tests.support.mirror.job import Job
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source, until
from tests.support.mirror.training_jobs import JobClient, runtime, spec
from tests.support.mirror.uploads import Upload, Uploads, archives_of, uploads_of

LARGE = noise(17 * MIB + 3, 1)
PARTS = [LARGE[at : at + CHUNK_SIZE] for at in range(0, len(LARGE), CHUNK_SIZE)]


@pytest.fixture
async def mirror(tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with mirror_under_test(tmp_path / "mirror", serve=True, limit_request_bytes=1024) as mirror:
        yield mirror


@pytest.fixture
async def uploads(mirror: MirrorUnderTest) -> AsyncIterator[Uploads]:
    async with uploads_of(mirror) as uploads:
        yield uploads


async def project_of(mirror: MirrorUnderTest, name: str = "llama") -> str:
    """The id of a project, which has one checkpoint, ``job1/checkpoint-100``."""
    job = Job(mirror)
    async with job.plane:
        await job.push({"step.pt": b"weights"}, f"bt://{name}@job1/checkpoint-100")
        return str((await job.checkpoints(project=name))[0]["project_id"])


async def committed(mirror: MirrorUnderTest, upload: Upload, project: str, job: str = "job2") -> str:
    return await archives_of(mirror).commit("default", None, upload.key, project, job)


async def tree(mirror: MirrorUnderTest, uri: str) -> dict[str, bytes]:
    done = await mirror.ready(source(uri))
    assert (done["bytes_transferred"], done["bytes_reused"]) == (0, done["bytes_total"])
    return await mirror.tree(done["sources"][0]["manifest"])


@pytest.mark.parametrize("size", [0, 1, MIB + 1, CHUNK_SIZE, len(LARGE)])
async def test_upload__of_boto3_as_truss_calls_it__becomes_the_archive_of_a_job(
    mirror: MirrorUnderTest, uploads: Uploads, tmp_path: Path, size: int
) -> None:
    project, upload = await project_of(mirror), await uploads.begin()
    path = tmp_path / "archive.tgz"
    path.write_bytes(LARGE[:size])
    await upload.upload_file(path)
    with pytest.raises(UploadRefusedError, match="does not exist"):  # of another organisation
        await archives_of(mirror).commit("acme", None, upload.key, project, "job2")
    found = await committed(mirror, upload, project)
    assert found == f"bt://{project}@job2/.archive" == await committed(mirror, upload, project)
    assert await tree(mirror, found) == {"archive.tgz": LARGE[:size]}


async def test_parts__in_any_order_and_one_twice__are_the_object_in_the_order_of_their_numbers(
    mirror: MirrorUnderTest, uploads: Uploads
) -> None:
    project, upload = await project_of(mirror), await uploads.begin()
    begun = await upload.ask("create_multipart_upload")
    assert begun["UploadId"] == upload.key
    last = await upload.part(7, PARTS[2])
    await upload.part(1, PARTS[1])  # another content comes in its place
    second, first, again = await asyncio.gather(
        upload.part(2, PARTS[1]), upload.part(1, PARTS[0]), upload.part(2, PARTS[1])
    )
    assert second == again == {"PartNumber": 2, "ETag": f'"{digest_of(PARTS[1])}"'}
    await upload.complete(first, second, last)
    assert await tree(mirror, await committed(mirror, upload, project)) == {"archive.tgz": LARGE}


async def test_archive__is_not_a_checkpoint_to_those_who_list_or_load_them(
    mirror: MirrorUnderTest, uploads: Uploads
) -> None:
    project, upload = await project_of(mirror), await uploads.begin()
    await upload.ask("put_object", Body=b"code")
    before = (await mirror.get("/projects"))["items"]
    await committed(mirror, upload, project, "job1")
    assert [one["checkpoint_id"] for one in (await mirror.get("/checkpoints"))["items"]] == ["checkpoint-100"]
    assert (await mirror.get("/projects"))["items"] == before
    for uri in (f"bt://{project}", f"bt://{project}@job1"):
        assert await tree(mirror, uri) == {"step.pt": b"weights"}
    deleted = await mirror.http.delete(f"/projects/{project}")
    assert deleted.status_code == 200, deleted.text
    assert (await mirror.failed(source(f"bt://{project}@job1/.archive")))["code"] == "SOURCE_NOT_FOUND"


async def test_archive__stays_when_checkpoints_expire(tmp_path: Path) -> None:
    at = [1_800_000_000.0]
    async with (
        mirror_under_test(tmp_path / "mirror", serve=True, clock=lambda: at[0]) as mirror,
        uploads_of(mirror) as uploads,
    ):
        project, upload = await project_of(mirror), await uploads.begin()
        await upload.ask("put_object", Body=b"code")
        await committed(mirror, upload, project)
        at[0] += 1
        await project_of(mirror)  # a version of its checkpoint that is newer than the archive
    at[0] += 101
    async with mirror_under_test(tmp_path / "mirror", clock=lambda: at[0], checkpoint_seconds=100) as mirror:
        await until(lambda: mirror.behind.query("SELECT name FROM checkpoints") == [(".archive",)])


async def test_archive_whose_job_was_never_recorded__is_deleted_after_an_hour(tmp_path: Path) -> None:
    at = [1_800_000_000.0]
    async with (
        mirror_under_test(tmp_path / "mirror", serve=True, clock=lambda: at[0], work=False) as mirror,
        uploads_of(mirror) as uploads,
    ):
        client, upload, lost = await JobClient.of(mirror), await uploads.begin(), await uploads.begin()
        for one in (upload, lost):
            await one.ask("put_object", Body=b"code")
        artifacts = [{"s3_bucket": "b", "s3_key": upload.key}]
        job = await client.create(spec(runtime=runtime(artifacts=artifacts)))
        await committed(mirror, lost, client.project)

        async def archives() -> set[str]:
            await mirror.service.controller.look()
            return {str(name) for (name,) in mirror.behind.query("SELECT job FROM checkpoints")}

        at[0] += 3599
        assert await archives() == {job, "job2"}
        at[0] += 61
        assert await archives() == {job}


async def test_archive_of_a_job__is_reused_by_another_and_outlives_the_first(
    mirror: MirrorUnderTest, uploads: Uploads
) -> None:
    archives, (project, upload) = archives_of(mirror), (await project_of(mirror), await uploads.begin())
    await upload.ask("put_object", Body=b"code")
    await committed(mirror, upload, project)
    for _ in range(2):
        assert await archives.reuse(project, "job2", "job3") == f"bt://{project}@job3/.archive"
    rows = mirror.behind.query("SELECT id FROM checkpoints WHERE job = 'job2'")
    assert (await mirror.http.delete(f"/checkpoints/{rows[0][0]}")).status_code == 200
    await mirror.collect(grace_seconds=0)
    assert await tree(mirror, f"bt://{project}@job3/.archive") == {"archive.tgz": b"code"}
    with pytest.raises(NotFoundError):
        await archives.reuse(project, "job2", "job4")


async def test_key__that_is_no_completed_upload_of_the_caller__is_refused(tmp_path: Path) -> None:
    at = [1_800_000_000.0]
    async with (
        mirror_under_test(tmp_path / "mirror", serve=True, clock=lambda: at[0]) as mirror,
        uploads_of(mirror) as uploads,
    ):
        project, other = await project_of(mirror), await project_of(mirror, "other")
        used, begun, aborted, lost = [await uploads.begin() for _ in range(4)]
        await used.ask("put_object", Body=b"code")
        await committed(mirror, used, project)
        with pytest.raises(UploadRefusedError, match="was used by another job"):
            await archives_of(mirror).commit("default", None, used.key, other, "job9")
        await begun.part(1, b"code")
        await aborted.ask("abort_multipart_upload", UploadId=aborted.key)
        await lost.ask("put_object", Body=b"code")
        at[0] += GIVEN_UP_SECONDS + 1
        assert (await mirror.ended(lost.key))["error"]["code"] == "PUSH_GIVEN_UP"
        pushed = await mirror.get("/mirror", source="bt://llama@job1/checkpoint-100")
        for key, problem in {
            "mir_" + "0" * 24: "does not exist, or is not yours",
            pushed["items"][0]["id"]: "does not exist, or is not yours",
            aborted.key: "has ended",
            lost.key: "has ended",
        }.items():
            with pytest.raises(UploadRefusedError, match=problem):
                await archives_of(mirror).commit("default", None, key, other, "job9")
        fresh = await uploads.begin()
        with pytest.raises(UploadRefusedError, match="is not complete"):
            await committed(mirror, fresh, project)
        with pytest.raises(NotFoundError):
            await committed(mirror, fresh, "0" * 10)


async def test_key_of_an_upload__serves_one_job(mirror: MirrorUnderTest, uploads: Uploads) -> None:
    client, upload = await JobClient.of(mirror), await uploads.begin()
    await upload.ask("put_object", Body=b"code")
    request = spec(runtime=runtime(artifacts=[{"s3_bucket": upload.object["Bucket"], "s3_key": upload.key}]))
    job = await client.create(request)
    again = await client.ask("POST", body={"training_job": request})
    assert (again.status_code, "was used by another job" in again.json()["message"]) == (422, True)
    assert [one["id"] for one in (await client.ask("GET")).json()["training_jobs"]] == [job]


async def test_key_of_a_team__is_not_for_tokens_of_others(tmp_path: Path) -> None:
    operator = {"Authorization": "Bearer operator", "BDN-Organisation": "a"}
    async with (
        mirror_under_test(tmp_path / "mirror", serve=True, auth="token", token="operator") as mirror,
        uploads_of(mirror) as uploads,
    ):
        tokens = dict[str | None, str]()
        await mirror.http.post("/teams", json={"name": "beta"}, headers=operator)
        for team in ("beta", None):
            body = {"name": "job", "organisation": "a", "role": "controller", "team": team}
            tokens[team] = (await mirror.http.post("/tokens", json=body, headers=operator)).json()["token"]
        job = Job(mirror, tokens["beta"])
        async with job.plane:
            await job.push({"step.pt": b"x"}, "bt://theirs@job1/1")
            project = (await job.checkpoints())[0]["project_id"]
        archives, theirs, shared = (
            archives_of(mirror),
            await uploads.begin(tokens["beta"]),
            await uploads.begin(tokens[None]),
        )
        for upload in (theirs, shared):
            await upload.ask("put_object", Body=upload.key.encode())
        for key, team, organisation in (
            (theirs.key, "Default", "a"),
            (shared.key, "beta", "a"),
            (theirs.key, None, "b"),
        ):
            with pytest.raises(UploadRefusedError, match="does not exist"):
                await archives.commit(organisation, team, key, project, "job1")
        await archives.commit("a", "beta", theirs.key, project, "job1")
        await archives.commit("a", None, shared.key, project, "job2")
        for number, upload in enumerate((theirs, shared), start=1):
            asked = await job.ask("POST", "/mirror", weights=[source(f"bt://{project}@job{number}/.archive")])
            done = (await job.ask("GET", f"/mirror/{asked.json()['id']}?wait=60")).json()
            assert await mirror.tree(done["sources"][0]["manifest"], done["grant"]) == {
                "archive.tgz": upload.key.encode()
            }


async def test_requests__that_are_not_of_this_upload_or_not_whole__are_refused_in_the_words_of_s3(
    mirror: MirrorUnderTest, uploads: Uploads
) -> None:
    upload, other = await uploads.begin(), await uploads.begin()
    small = await upload.part(1, b"small")
    large = await upload.part(2, PARTS[0])
    multipart = {"UploadId": upload.key}
    for refused, call, given in (
        ((400, "BadDigest"), "put_object", {"Body": b"x", "ChecksumCRC32": "AAAAAA=="}),
        ((400, "BadDigest"), "put_object", {"Body": b"x", "ChecksumSHA256": "A" * 43 + "="}),
        ((400, "InvalidRequest"), "put_object", {"Body": b"x", "ChecksumCRC32": "?"}),
        ((400, "InvalidRequest"), "put_object", {"Body": bytes(CHUNK_SIZE + 1)}),
        ((400, "InvalidRequest"), "upload_part", multipart | {"PartNumber": 1, "Body": bytes(CHUNK_SIZE + 1)}),
        ((400, "InvalidRequest"), "upload_part", multipart | {"PartNumber": 10_001, "Body": b"x"}),
        ((404, "NoSuchUpload"), "upload_part", {"UploadId": other.key, "PartNumber": 1, "Body": b"x"}),
        ((400, "InvalidRequest"), "complete_multipart_upload", multipart | {"MultipartUpload": {"Parts": [small, large]}}),
        ((400, "InvalidRequest"), "complete_multipart_upload", multipart | {"MultipartUpload": {"Parts": [large, small]}}),
        (
            (400, "InvalidRequest"),
            "complete_multipart_upload",
            multipart | {"MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": f'"{digest_of(b"unsent")}"'}]}},
        ),
        ((400, "InvalidRequest"), "complete_multipart_upload", multipart | {"MultipartUpload": {"Parts": []}}),
        ((400, "InvalidRequest"), "get_object", {}),
    ):  # fmt: skip
        status, code, message = await upload.refusal(call, **given)
        assert (status, code) == refused, (call, message)
        is_wrong_size = given.get("Body") == bytes(CHUNK_SIZE + 1) or "has 5 bytes" in message
        assert (PART_RULE in message) == is_wrong_size
    signed = {"X-Amz-Security-Token": upload.token, "X-Amz-Content-SHA256": "0" * 64}
    answer = await uploads.http.put(upload.path, content=b"x", headers=signed)
    assert (answer.status_code, "<Code>BadDigest</Code>" in answer.text) == (400, True), answer.text
    await upload.ask("abort_multipart_upload", UploadId=upload.key)
    assert (await upload.refusal("put_object", Body=b"x"))[:2] == (404, "NoSuchUpload")


async def test_wrong_session_token__is_refused_before_the_body(mirror: MirrorUnderTest, uploads: Uploads) -> None:
    upload, other = await uploads.begin(), await uploads.begin()
    signer = mirror.service.requests.signer
    tokens = {
        "": "AccessDenied",
        "nonsense": "AccessDenied",
        other.token: "AccessDenied",
        signer.sign(PushGrant("default", CheckpointUri("llama", "job1"), 4e9)): "AccessDenied",
        signer.sign(UploadGrant("default", upload.key, 1.0)): "ExpiredToken",
        upload.token: "100 Continue",
    }
    host, port = uploads.url.removeprefix("http://").split(":")
    for token, expected in tokens.items():
        reader, writer = await asyncio.open_connection(host, int(port))
        with closing(writer):
            head = [f"PUT {upload.path} HTTP/1.1", f"Host: {host}", f"Content-Length: {CHUNK_SIZE}"]
            head += ["Expect: 100-continue", *([f"X-Amz-Security-Token: {token}"] if token else [])]
            writer.write("\r\n".join([*head, "", ""]).encode())
            if token == upload.token:
                assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
                continue
            refusal = (await reader.read()).decode()
            assert refusal.startswith("HTTP/1.1 403 ")
            assert f"<Code>{expected}</Code>" in refusal
    # A client that does not wait to be asked for the body gets the answer, too.
    answer = await uploads.http.put(upload.path, content=LARGE, headers={"X-Amz-Security-Token": "nonsense"})
    assert answer.status_code == 403


def in_aws_chunked(content: bytes, token: str) -> tuple[bytes, dict[str, str]]:
    """Body and headers, as boto3 sends them over TLS."""
    body = AwsChunkedWrapper(io.BytesIO(content), Crc32Checksum, "x-amz-checksum-crc32").read()
    return bytes(body), {
        "Content-Encoding": "aws-chunked",
        "X-Amz-Content-SHA256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        "X-Amz-Trailer": "x-amz-checksum-crc32",
        "X-Amz-Decoded-Content-Length": str(len(content)),
        "X-Amz-Security-Token": token,
    }


async def test_body_in_aws_chunked__with_trailing_checksum__is_decoded(
    mirror: MirrorUnderTest, uploads: Uploads
) -> None:
    project, upload = await project_of(mirror), await uploads.begin()
    body, headers = in_aws_chunked(PARTS[0], upload.token)

    async def pieces() -> AsyncIterator[bytes]:
        """Sent with ``Transfer-Encoding: chunked``."""
        for at in range(0, len(body), MIB):
            yield body[at : at + MIB]

    answer = await uploads.http.put(upload.path, content=pieces(), headers=headers)
    assert (answer.status_code, answer.headers["etag"]) == (200, f'"{digest_of(PARTS[0])}"'), answer.text
    assert await tree(mirror, await committed(mirror, upload, project)) == {"archive.tgz": PARTS[0]}


async def test_body_in_aws_chunked__that_is_not_what_its_headers_and_trailers_say__is_refused(uploads: Uploads) -> None:
    upload = await uploads.begin()
    body, headers = in_aws_chunked(b"x" * 10_000, upload.token)
    for wrong, other, code in (
        (body.replace(b"xx", b"xy", 1), {}, "BadDigest"),
        (body, {"X-Amz-Decoded-Content-Length": "10001"}, "InvalidRequest"),
        (body, {"X-Amz-Decoded-Content-Length": "9999"}, "InvalidRequest"),
        (body, {"X-Amz-Decoded-Content-Length": str(CHUNK_SIZE + 1)}, "InvalidRequest"),
        (body, {"X-Amz-Trailer": "x-amz-checksum-sha256"}, "InvalidRequest"),
        (body[:-2], {}, "InvalidRequest"),
        (body[2:], {}, "InvalidRequest"),
    ):
        answer = await uploads.http.put(upload.path, content=wrong, headers=headers | other)
        assert (answer.status_code, f"<Code>{code}</Code>" in answer.text) == (400, True), answer.text


async def test_endpoint__is_where_the_client_came_from(mirror: MirrorUnderTest, uploads: Uploads) -> None:
    for headers, endpoint in (
        ({}, f"{uploads.url}/uploads"),
        ({"BDN-Forwarded-Host": "api.localhost:8000"}, "http://api.localhost:8000/uploads"),
        ({"BDN-Forwarded-Host": "[::1]:8000"}, "http://[::1]:8000/uploads"),
    ):
        assert (await uploads.begin(**headers)).document["creds"]["endpoint_url"] == endpoint
    answer = await uploads.http.get("/v1/blobs/credentials/train", headers={"BDN-Forwarded-Host": "a/b"})
    assert answer.status_code == 422


async def test_upload_beyond_a_limit__is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bdn.mirror.jobs.pushes.UPLOAD_BYTES", 10)
    async with (
        mirror_under_test(tmp_path / "mirror", serve=True, limit_push_bytes=10_000) as mirror,
        uploads_of(mirror) as uploads,
    ):
        upload = await uploads.begin()
        for _ in range(2):
            await upload.part(1, b"0123456789")
        assert (await upload.refusal("put_object", Body=b"x"))[:2] == (400, "EntityTooLarge")
        monkeypatch.setattr("bdn.mirror.jobs.pushes.UPLOAD_BYTES", 100_000)
        assert (await upload.refusal("put_object", Body=bytes(10_000)))[:2] == (507, "QUOTA_EXCEEDED")
        assert (await mirror.get(f"/mirror/{upload.key}"))["status"] == "FAILED"

        # Archives count for the quota of checkpoints.
        project, first, second = await project_of(mirror), await uploads.begin(), await uploads.begin()
        await first.ask("put_object", Body=noise(6000, 3))
        await committed(mirror, first, project)
        await second.ask("put_object", Body=noise(6000, 4))
        with pytest.raises(UploadRefusedError, match="BDN_LIMIT_PUSH_BYTES"):
            await committed(mirror, second, project, "job3")


async def test_organisation_with_many_uploads__leaves_room_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bdn.mirror.api.uploads._SLOWEST", StallPolicy(window_seconds=3600.0))
    async with (
        mirror_under_test(tmp_path / "mirror", auth="token", token="operator") as mirror,
        uploads_of(mirror) as uploads,
    ):
        theirs, own = [await uploads.begin("operator", **{"BDN-Organisation": name}) for name in ("a", "b")]
        host, port = uploads.url.removeprefix("http://").split(":")
        head = [f"PUT {theirs.path} HTTP/1.1", f"Host: {host}", f"Content-Length: {CHUNK_SIZE}", "Expect: 100-continue"]
        head += [f"X-Amz-Security-Token: {theirs.token}", "", ""]
        connections = [await asyncio.open_connection(host, int(port)) for _ in range(BUFFERS)]
        for _, writer in connections:
            writer.write("\r\n".join(head).encode())
        begun = {asyncio.create_task(reader.readline()) for reader, _ in connections}
        waiting = begun
        while len(begun) - len(waiting) < BUFFERS // 2:  # which wait for bodies that do not come
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await own.ask("put_object", Body=b"code")
        for task in waiting:
            task.cancel()
        for _, writer in connections:
            writer.close()


async def test_body_that_stalls__is_given_up_and_not_its_buffer(
    mirror: MirrorUnderTest, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bdn.mirror.api.uploads._SLOWEST", StallPolicy(window_seconds=0.05))
    upload = await uploads.begin()
    host, port = uploads.url.removeprefix("http://").split(":")
    for _ in range(BUFFERS // 2 + 1):  # more buffers than this organisation gets
        reader, writer = await asyncio.open_connection(host, int(port))
        with closing(writer):
            head = [f"PUT {upload.path} HTTP/1.1", f"Host: {host}", "Content-Length: 9", "Expect: 100-continue"]
            writer.write("\r\n".join([*head, f"X-Amz-Security-Token: {upload.token}", "", "half"]).encode())
            async with asyncio.timeout(60):
                assert b"<Code>RequestTimeout</Code>" in await reader.read()
