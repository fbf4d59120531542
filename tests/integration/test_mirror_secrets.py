"""Secrets of the operator: read when they are used, from a folder or the environment."""

from pathlib import Path

import pytest

from tests.doubles.hub import Hub
from tests.support.mirror.service import mirror_under_test, source, with_secret

pytest_plugins = ("tests.support.mirror.fixtures",)


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
