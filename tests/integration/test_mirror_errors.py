"""Each error of docs/contract.md that the mirror can produce, by what triggers it; none publishes anything."""

import json
from typing import Any

import pytest

from tests.doubles.content import GeneratedContent
from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Bucket
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, refusal, source, with_secret

pytest_plugins = ("tests.support.mirror.fixtures",)

MODEL = source("hf://org/model")
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def model(hub: Hub) -> None:
    hub.repo("org/model").commit({"config.json": b"{}", "sub/model.safetensors": b"weights"})


REFUSED: list[tuple[Any, str, str]] = [  # one of each kind: the others are in tests/unit/wire and tests/unit/core
    ([], "INVALID_REQUEST", "the body"),
    ({"weights": [MODEL], "training_job": {"weights": [MODEL]}}, "INVALID_REQUEST", "either"),
    ({"weights": [{**MODEL, "sorce": 1, "auth": None}]}, "INVALID_REQUEST", "weights.0.sorce: is not a known field"),
    ({"weights": [{**MODEL, "auth": {"auth_method": "AWS_OIDC"}}]}, "INVALID_REQUEST", "aws_oidc_role_arn"),
    ({"weights": [source("s3://key:secret@bucket/a")]}, "INVALID_SOURCE", "credentials do not belong"),
    ({"weights": [source("s3://bucket/\ud800")]}, "INVALID_REQUEST", "weights.0.source: invalid Unicode"),
    ({"weights": [source("hf://o/r", "/m/sub"), source("hf://o/s", "/m")]}, "INVALID_MOUNT", "inside '/m'"),
]


async def test_a_wrong_request_leaves_nothing(idle: MirrorUnderTest, hub: Hub, subtests: pytest.Subtests) -> None:
    for body, code, said in REFUSED:
        for dry_run in (False, True):
            with subtests.test(said, dry_run=dry_run):
                content = json.dumps(body)  # as clients do, lone surrogates included
                reply = await idle.http.post("/mirror", content=content, params={"dry_run": dry_run}, headers=JSON)
                error = reply.json()["error"]
                assert (reply.status_code, error["code"], error["retryable"]) == (422, code, False), reply.text
                assert said in error["message"]
    assert idle.count("mirrors") == idle.count("mirror_sources") == 0
    assert not hub.log.count()


FAILED: list[tuple[Json, str, str]] = [  # what each source makes of its upstream's answers is in tests/contract
    (source("hf://org/private"), "AUTH_REQUIRED", "auth_secret_name"),
    (source("hf://org/gated", **with_secret("stranger")), "GATED_SOURCE", "accept its terms"),
    (source("hf://org/none", **with_secret("hub-token")), "SOURCE_NOT_FOUND", "hf://org/none"),
    (source("hf://org/model@nope"), "REVISION_NOT_FOUND", "'nope'"),
    (source("hf://org/model", **with_secret("nowhere")), "SECRET_NOT_FOUND", "BDN_SECRET_nowhere"),
    (source("hf://org/model", **with_secret("../x")), "SECRET_NOT_FOUND", "'../x'"),
    (source("hf://org/model", **with_secret("s3-keys")), "SECRET_MALFORMED", "plain Hugging Face token"),
    (source("s3://{bucket}/x", **with_secret("hub-token")), "SECRET_MALFORMED", "is not a JSON object"),
    (source("s3://{bucket}/nothing-here/", **with_secret("s3-keys")), "NO_FILES_MATCHED", "holds no files"),
    (source("hf://org/empty"), "NO_FILES_MATCHED", "holds no files"),
    (source("hf://buckets/org/hidden"), "AUTH_REQUIRED", "auth_secret_name"),
    (source("hf://buckets/org/hidden", **with_secret("stranger")), "SOURCE_NOT_FOUND", "hidden from the account"),
    (source("hf://buckets/org/none", **with_secret("hub-token")), "SOURCE_NOT_FOUND", "hf://buckets/org/none"),
    (source("hf://buckets/org/hidden/none", **with_secret("hub-token")), "NO_FILES_MATCHED", "holds no files"),
    (
        source("hf://buckets/org/hidden", **with_secret("hub-token"), allow_patterns=["*.txt"]),
        "NO_FILES_MATCHED",
        "'**/*.txt' would have",
    ),
    (source("hf://org/model", allow_patterns=["*.txt"]), "NO_FILES_MATCHED", "none of the 2 files"),
    (source("hf://org/model", allow_patterns=["*.safetensors"]), "NO_FILES_MATCHED", "'**/*.safetensors' would have"),
    (source("hf://org/model", ignore_patterns=["**"]), "NO_FILES_MATCHED", "ignore_patterns '**'"),
    (source("hf://org/dots"), "INVALID_SOURCE", "'..'"),
    (source("hf://org/both"), "INVALID_SOURCE", "'a' is both a file and a folder"),
    (source("s3://{bucket}/both/", **with_secret("s3-keys")), "INVALID_SOURCE", "both a file and a folder"),
    (source("r2://account.bucket/x"), "AUTH_REQUIRED", "refused access"),
]


@pytest.fixture
def troubled(hub: Hub, bucket: S3Bucket, model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstreams and secrets with which everything in ``FAILED`` goes wrong."""
    for name in ("private", "gated"):
        hub.repo(f"org/{name}", private=name == "private", gated=name == "gated").commit({"a": b"1"})
    hub.repo("org/empty").commit({})
    hub.bucket("org/hidden", private=True).put({"none.txt/a": b"1", "m/a.txt": b"1"})
    hub.repo("org/dots").commit({"a/../../b": b"1", "ok": b"1"})
    hub.repo("org/both").commit({"a": b"1", "a/b": b"1"})
    bucket.put({"x": b"1", "both/a": b"1", "both/a/b": b"1"})
    monkeypatch.setenv("BDN_SECRET_STRANGER", hub.stranger_token)


async def test_a_source_that_cannot_be_had_fails_the_mirror_with_its_own_error(
    mirror: MirrorUnderTest, bucket: S3Bucket, troubled: None, subtests: pytest.Subtests
) -> None:
    for given, code, said in FAILED:
        wanted = {**given, "source": given["source"].format(bucket=bucket.name)}
        with subtests.test(said, **wanted):
            planned = (await mirror.post(wanted, dry_run=True)).json()["error"]
            error = await mirror.failed(wanted)
            assert error == planned
            assert (error["code"], error["retryable"]) == (code, False), error
            assert said in error["message"]
    assert {row[3] for row in mirror.rows("mirrors")["mirrors"]} == {"FAILED"}
    assert not mirror.chunks()


async def test_the_first_error_is_the_mirrors_and_the_rest_is_done(mirror: MirrorUnderTest, model: None) -> None:
    wanted = (source("hf://org/none"), source("hf://org/model", "/two"), source("hf://org/model@nope", "/three"))
    document = await mirror.mirror(*wanted)
    assert [part["status"] for part in document["sources"]] == ["FAILED", "READY", "FAILED"]
    assert document["sources"][2]["error"]["code"] == "REVISION_NOT_FOUND"
    assert document["error"] == document["sources"][0]["error"]
    assert (document["error"]["code"], document["grant"]) == ("AUTH_REQUIRED", None)


@pytest.mark.parametrize(("limit", "fits", "said"), [("limit_files", 2, "files of"), ("limit_bytes", 9, "bytes of")])
async def test_a_source_beyond_the_limits_is_refused(
    upstreams: None, model: None, tmp_path: Any, limit: str, fits: int, said: str
) -> None:
    less: dict[str, Any] = {limit: fits - 1}
    just: dict[str, Any] = {limit: fits}
    async with mirror_under_test(tmp_path / "one less", **less) as mirror:
        error = await mirror.failed(MODEL)
        assert (error["code"], error["message"]) == (
            "LIMIT_EXCEEDED",
            f"{said} hf://org/model: {fits} is over the limit of {fits - 1}",
        )
        assert (await mirror.post(MODEL, dry_run=True)).status_code == 413
    async with mirror_under_test(tmp_path / "just", **just) as mirror:
        await mirror.ready(MODEL)


async def test_a_source_of_10_tb__is_within_the_limits_that_nobody_set(mirror: MirrorUnderTest, hub: Hub) -> None:
    terabyte = 1000**4
    parts = {f"{number}.tar": GeneratedContent(terabyte, number).declaring(f"{number:064x}") for number in range(10)}
    hub.repo("org/large").commit(parts)
    plan = await mirror.plan(source("hf://org/large"))
    assert (plan["files"], plan["bytes_to_transfer"]) == (10, 10 * terabyte)


async def test_what_is_not_there_is_not_found_and_a_name_that_cannot_be_one_is_invalid(
    idle: MirrorUnderTest, subtests: pytest.Subtests
) -> None:
    mirror, digest = f"/mirror/mir_{'0' * 24}", f"b3:{'0' * 64}"
    absent = (mirror, f"{mirror}/events", f"/manifests/{digest}", f"/chunks/{digest}", f"/evictions/evi_{'0' * 24}")
    wrong = ("/mirror/x", "/manifests/b3:00", "/chunks/sha256", "/evictions/1", "/mirror?cursor=x", "/mirror?limit=0")
    expected = dict.fromkeys((*absent, "/nowhere"), (404, "NOT_FOUND")) | dict.fromkeys(wrong, (422, "INVALID_REQUEST"))
    for path, told in expected.items():
        with subtests.test(path):
            assert refusal(await idle.http.get(path)) == told
    assert refusal(await idle.http.post(f"{mirror}/cancel")) == (404, "NOT_FOUND")
