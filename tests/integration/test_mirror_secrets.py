"""Secrets never appear: not in logs, rows, answers, manifests or metrics, whatever goes wrong."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import httpx2
import pytest

from bdn.core.chunk import CHUNK_SIZE
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import answer, drop, truncate
from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Bucket, S3Server
from tests.support.mirror.service import mirror_under_test, source, with_secret

pytest_plugins = ("tests.support.mirror.fixtures",)

OPERATOR = "operator-token-7"
CONTENT = GeneratedContent(CHUNK_SIZE + 9)


def text_of(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file() and "chunks" not in path.parts]
    return "".join(path.read_bytes().decode(errors="replace") for path in files)


async def test_no_secret_and_no_signed_address_is_ever_shown_or_kept(
    upstreams: None,
    hub: Hub,
    s3: S3Server,
    bucket: S3Bucket,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, logger="bdn")
    monkeypatch.setenv(
        "BDN_SECRET_BAD_KEYS", '{"aws_access_key_id": "AKIAWRONG", "aws_secret_access_key": "wrong-key-9"}'
    )
    monkeypatch.setenv("BDN_SECRET_BAD_JSON", '{"aws_secret_access_key": "unclosed-8"')
    monkeypatch.setenv("BDN_SECRET_BAD_TOKEN", "hf_wrong6 with spaces")
    hub.repo("org/private", private=True).commit({"model.safetensors": CONTENT, "small.json": b"{}"})
    bucket.put({"data/a.bin": b"weights"})
    private = source("hf://org/private", "/p", **with_secret("hub-token"))
    objects = source(f"s3://{bucket.name}/data", "/d", **with_secret("s3-keys"))
    shown: list[str] = []

    async def note(reply: httpx2.Response) -> None:
        shown.append(f"{reply.headers} {(await reply.aread()).decode(errors='replace')}")

    async with mirror_under_test(tmp_path, bearer=OPERATOR, auth="token", token=OPERATOR) as mirror:
        mirror.http.event_hooks["response"] = [note]
        for fault in (answer(403, body=b"denied"), answer(412), truncate(0), drop()):
            s3.fail(fault, "data/a.bin", times=None)
            await mirror.failed(objects)
            s3.script.clear()
        hub.fail(answer(500, body=b"hf_owner echoed"), origin="cdn", times=None)
        await mirror.failed(private)
        hub.script.clear()
        hub.fail(drop(), "/api/", times=None)
        await mirror.failed(private)
        hub.script.clear()
        for name, uri in (
            ("bad-keys", objects["source"]),
            ("bad-json", objects["source"]),
            ("bad-token", private["source"]),
        ):
            await mirror.failed(source(uri, **with_secret(name)))
            await mirror.post(source(uri, **with_secret(name)), dry_run=True)
        await mirror.plan(private, objects)
        document = await mirror.ready(private, objects)
        hub.expire_links()
        for part in document["sources"]:
            await mirror.tree(part["manifest"])
        for path in ("/mirror?limit=100", "/manifests", "/metrics", "/openapi.json", "/agents"):
            await mirror.http.get(path)
        rows = repr(mirror.rows())
    everything = {
        "logs": caplog.text + "".join(repr(vars(record)) for record in caplog.records),
        "rows": rows,
        "answers": "".join(shown),
        "files": await asyncio.to_thread(text_of, tmp_path),
    }
    assert "mirror failed" in everything["logs"]
    assert "CHECKSUM" not in everything["answers"]
    assert "SECRET_MALFORMED" in everything["answers"]
    secrets = (hub.token, s3.account.secret_access_key, s3.account.access_key_id, OPERATOR)
    wrong = ("AKIAWRONG", "wrong-key-9", "unclosed-8", "hf_wrong6", "echoed")
    for place, text in everything.items():
        for secret in (*secrets, *wrong, "X-Amz-Signature", "X-Amz-Credential", "Signature=", "Bearer "):
            assert secret not in text.replace('"scheme":"bearer"', ""), f"{secret} in {place}"


async def test_a_mirror_of_private_sources_needs_the_secret_each_time(
    upstreams: None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("org/private", private=True).commit({"a.txt": b"1"})
    private = source("hf://org/private", **with_secret("team-token"))
    async with mirror_under_test(tmp_path / "m", secrets_dir=tmp_path) as mirror:
        (tmp_path / "team-token").write_text(f"{hub.token}\n")
        await mirror.ready(private)
        (tmp_path / "team-token").write_text(hub.stranger_token)  # revoked: what is held opens nothing
        assert (await mirror.failed(private))["code"] == "SOURCE_NOT_FOUND"
        (tmp_path / "team-token").unlink()
        assert (await mirror.failed(private))["code"] == "SECRET_NOT_FOUND"
        monkeypatch.setenv("BDN_SECRET_TEAM_TOKEN", hub.token)
        assert (await mirror.ready(private))["bytes_transferred"] == 0
