"""Programs that run until somebody ends them, and commands that wait: `up`, `worker`, `migrate`, `mirror --wait`, and pulls at once."""

import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bdn.disk.binding import mounts_below
from bdn.mirror.db.recall import HEAD
from bdn.wire.grants import new_signing_key
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.agent.mounts import needs_mounts, unmounting
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.mirror.backends import write_keys
from tests.support.mirror.service import mirror_under_test, source
from tests.support.services.commands import Shell, wait_until

pytest_plugins = ("tests.support.mirror.fixtures",)
MODEL = {"config.json": b"{}", "model.safetensors": noise(9 * MIB + 1, 2)}
FREE_PORTS = {"BDN_PORT": "0", "BDN_DATA_PORT": "0", "BDN_AGENT_DATA_PORT": "0", "BDN_AGENT_GATEWAY": "127.0.0.1:0"}


def given(shell: Shell, **environment: str) -> Shell:
    """The same user with more settings."""
    return replace(shell, extra={**shell.extra, **environment})


def beside(shell: Shell, up: Any) -> Shell:
    """The same user, whose commands find the services of this ``bdn up``."""
    return given(shell, BDN_URL=up["mirror"], BDN_AGENT_SOCKET=up["agent"].removeprefix("unix:"))


def printed(log: Path) -> Any:
    """The first document in a log, as soon as all of it is there."""

    def document() -> Any:
        text = log.read_text()
        try:
            return json.JSONDecoder().raw_decode(text, text.index("{\n"))[0]
        except ValueError:
            return None

    wait_until(document, seconds=120, what=f"a document in {log}")
    return document()


def test_up_is_a_mirror_and_an_agent_until_it_is_interrupted(shell: Shell, hub: Hub) -> None:
    hub.repo("org/model").commit(MODEL)
    with given(shell, **FREE_PORTS, BDN_AGENT_EXPOSURE="symlink").running("bdn", "up", "--json") as process:
        up = printed(shell.root / "bdn-up.log")
        assert up.keys() == {"mirror", "data_port", "agent", "gateway"}

        mirrored = beside(shell, up).told("bdn", "mirror", "hf://org/model", "--wait")
        assert mirrored["status"] == "READY"
        staged = beside(shell, up).told("bdn", "stage", mirrored["id"], "--job", "j")
        assert tree(Path(staged["mounts"][0]["path"])) == MODEL

        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert "Traceback" not in (shell.root / "bdn-up.log").read_text()


@pytest.mark.embedded("it has PostgreSQL by itself")
async def test_a_worker_and_a_migration_are_programs_of_their_own_on_postgresql(
    shell: Shell, hub: Hub, upstreams: None, empty_postgres_url: str, tmp_path: Path
) -> None:
    hub.repo("org/model").commit(MODEL)
    embedded = shell.run("bdn", "worker")
    assert (embedded.code, "set BDN_DATABASE_URL" in embedded.err) == (2, True), embedded.err
    early = shell.run("bdn", "worker", BDN_DATABASE_URL=empty_postgres_url)
    assert (early.code, "run 'bdn migrate'" in early.err) == (1, True), early.err
    for before in (None, HEAD):
        migrated = shell.run("bdn", "migrate", "--json", BDN_DATABASE_URL=empty_postgres_url)
        assert (migrated.code, migrated.document.items() >= {"before": before, "now": HEAD}.items()) == (0, True), (
            migrated.err
        )

    keys = write_keys(tmp_path / "keys.pem", new_signing_key())
    shared: dict[str, Any] = {"database_url": empty_postgres_url, "grant_key_file": keys}
    async with mirror_under_test(tmp_path / "data", work=False, **shared) as mirror:
        begun = await mirror.begin(source("hf://org/model"))
        with shell.running(
            "bdn", "worker", BDN_DATABASE_URL=empty_postgres_url, BDN_GRANT_KEY_FILE=str(keys)
        ) as process:
            done = await mirror.ended(begun["id"])
            assert done["status"] == "READY", done["error"]
            assert await mirror.tree(done["sources"][0]["manifest"]) == MODEL
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def test_the_exit_code_of_a_mirror_is_1_when_it_failed(shell: Shell, hub: Hub) -> None:
    hub.repo("org/model").commit(MODEL)
    with given(shell, **FREE_PORTS).running("bdn", "serve"):
        log = shell.root / "bdn-serve.log"
        wait_until(lambda: "mirror at " in log.read_text(), seconds=120)
        user = given(shell, BDN_URL=log.read_text().partition("mirror at ")[2].split()[0])
        good, bad = ("hf://org/model", "--mount", "/a"), ("hf://org/none", "--mount", "/b")
        done = user.run("bdn", "mirror", *good, "--wait", "--quiet")
        assert (done.code, re.fullmatch(r"mir_\w+\n", done.out) is not None, done.err) == (0, True, "")
        for sources in (bad, (*good, *bad)):
            failed = user.run("bdn", "mirror", *sources, "--wait", "--json")
            assert (failed.code, failed.document["status"]) == (1, "FAILED"), failed.err
            assert failed.document["error"]["code"] in {"AUTH_REQUIRED", "SOURCE_NOT_FOUND"}
        quiet = user.run("bdn", "mirror", *bad, "--wait", "--quiet")
        assert (quiet.code, re.fullmatch(r"mir_\w+\n", quiet.out) is not None) == (1, True)
        assert "Check the spelling of its name first" in quiet.err
        assert "HF_TOKEN or run 'hf auth login'" in quiet.err
        assert "--secret NAME" in quiet.err


@pytest.mark.embedded("pulls wait for the lock of SQLite's directory")
def test_a_pull_waits_for_another_one_on_the_same_data(shell: Shell, hub: Hub) -> None:
    hub.repo("org/model").commit(MODEL)
    hub.fail(stall(), origin="cdn")
    log = shell.root / "bdn-pull.log"
    with shell.running("bdn", "pull", "hf://org/model", "one") as first:
        wait_until(lambda: hub.log.count(origin="cdn"), seconds=120, what="the first pull's request")
        with shell.running("bdn", "pull", "hf://org/model", "two") as second:
            wait_until(lambda: "waiting for bdn pull" in log.read_text(), seconds=120, what="the second pull's remark")
            assert (first.poll(), second.poll()) == (None, None)
            hub.release_stalled()
            assert (first.wait(120), second.wait(120)) == (0, 0), log.read_text()
    assert tree(shell.root / "one") == tree(shell.root / "two") == MODEL


@needs_mounts
def test_up__stopped_or_killed__names_its_mounts_and_the_next_one_removes_them(shell: Shell, hub: Hub) -> None:
    hub.repo("org/model").commit(MODEL)
    here = given(shell, **FREE_PORTS, BDN_AGENT_EXPOSURE="bind")
    log = shell.root / "bdn-up.log"
    with unmounting(shell.root):
        with here.running("bdn", "up", "--json") as process:
            up = printed(log)
            user = beside(here, up)
            mirrored = user.told("bdn", "mirror", "hf://org/model", "--wait")
            path = Path(user.told("bdn", "stage", mirrored["id"], "--job", "j")["mounts"][0]["path"])
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        said = log.read_text()
        assert f"  {path}\n" in said
        assert "'bdn unstage --all' and 'bdn volumes rm --all'" in said
        assert tree(path) == MODEL  # its job reads on

        log.unlink()
        with here.running("bdn", "up", "--json") as process:
            printed(log)
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        log.unlink()
        with here.running("bdn", "up", "--json") as process:
            user = beside(here, printed(log))
            assert [one["state"] for one in user.told("bdn", "unstage", "--all")["items"]] == ["RELEASED"]
            assert user.told("bdn", "volumes", "rm", "--all")["items"] == []
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        assert "still mounted" not in log.read_text()
        assert mounts_below(shell.root) == []
        shutil.rmtree(shell.data)
