"""``bdn pull`` on the data directory of services that run: it uses their mirror, and their agent where there is one."""

import json
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.errors import IncompleteSnapshotError

from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.services.commands import Process, Shell, wait_until

pytestmark = pytest.mark.embedded("services are found by the lock of SQLite's directory")
MODEL = {"config.json": b"{}", "model.safetensors": noise(9 * MIB + 1, 2)}

FREE_PORTS = {
    "BDN_PORT": "0",
    "BDN_DATA_PORT": "0",
    "BDN_AGENT_DATA_PORT": "0",
    "BDN_AGENT_GATEWAY": "127.0.0.1:0",
    "BDN_AGENT_EXPOSURE": "symlink",
}
UP = [("bdn", "up")]
SERVE_AND_AGENT = [("bdn", "serve"), ("bdn-node-agent",)]
SERVE = [("bdn", "serve")]


@pytest.fixture
def user(shell: Shell) -> Shell:
    return Shell(shell.root, {**shell.extra, **FREE_PORTS}, is_forked=True)


def lock_of(user: Shell) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads((user.data / "mirror.lock").read_bytes())
    except (OSError, ValueError):
        return {}
    return found


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@contextmanager
def services(user: Shell, commands: Sequence[tuple[str, ...]]) -> Iterator[list[Process]]:
    """Until the block ends; they answer."""
    with ExitStack() as stack:
        processes: list[Process] = []
        for command in commands:
            url = {"BDN_URL": lock_of(user)["url"]} if processes else {}
            processes.append(stack.enter_context(user.running(*command, **url)))
            wait_until(lambda: "url" in lock_of(user), seconds=120, what="a mirror that answers")
        if commands != SERVE:
            wait_until(lambda: answers(user.data / "agent.sock"), seconds=120, what="an agent that answers")
        yield processes


@pytest.mark.parametrize("commands", [UP, SERVE_AND_AGENT, SERVE], ids=["up", "serve-and-agent", "serve-alone"])
def test_a_pull_uses_the_services_and_the_upstream_is_read_once_for_all(
    user: Shell, hub: Hub, commands: Sequence[tuple[str, ...]]
) -> None:
    repository = hub.repo("org/model")
    sha = repository.commit(MODEL)
    with services(user, commands):
        assert user.run("bdn", "mirror", "hf://org/model", "--wait", BDN_URL=lock_of(user)["url"]).code == 0
        hub.log.clear()

        pulled = user.run("bdn", "pull", "hf://org/model", "out", "--json")
        linked = user.run("bdn", "pull", f"hf://org/model@{sha}", "linked", "--link", "--json")
        assert (pulled.code, linked.code) == (0, 0), pulled.err + pulled.out + linked.err + linked.out
        assert tree(user.root / "out") == tree(user.root / "linked") == MODEL
        assert (pulled.document["destination"], pulled.document["bytes_transferred"]) == (str(user.root / "out"), 0)
        assert linked.document["view"] == "hardlink"
        assert hub.log.bytes_served("/resolve/") == 0

        new = repository.commit({"config.json": b"[]"})
        updated = user.told("bdn", "pull", "hf://org/model", "out")
        assert (updated["resolved_revision"], updated["bytes_transferred"]) == (new, 2)
        hub.log.clear()
        offline = user.run("bdn", "pull", "hf://org/model", "another", "--offline", "--json")
        pinned = user.run("bdn", "pull", f"hf://org/model@{sha}", "older", "--json")
        assert (offline.document["resolved_revision"], pinned.document["resolved_revision"]) == (new, sha)
        assert hub.log.count() == 0

        narrower = user.run("bdn", "pull", "hf://org/model", "out", "--allow", "*.json", "--json")
        assert narrower.document["error"]["code"] == "INVALID_REQUEST"
        assert "would remove or replace model.safetensors; add --replace" in narrower.document["error"]["message"]
        replaced = user.run("bdn", "pull", "hf://org/model", "out", "--allow", "*.json", "--replace")
        assert (replaced.code, tree(user.root / "out")) == (0, {"config.json": b"[]"}), replaced.err
        (user.root / "mine").mkdir()
        (user.root / "mine/file").write_text("mine")
        for occupied in ("mine", "."):
            refused = user.run("bdn", "pull", "hf://org/model", occupied)
            assert (refused.code, "cannot put files at" in refused.err) == (2, True), refused.err
        unknown = user.run("bdn", "pull", "hf://org/absent", "none", "--offline")
        assert unknown.code == 4, unknown.err

    wider = user.run("bdn", "pull", "hf://org/model", "out")  # without them, it is known what was pulled there
    assert wider.code == 0, wider.err
    assert tree(user.root / "out") == {**MODEL, "config.json": b"[]"}


@pytest.mark.parametrize("commands", [UP, SERVE], ids=["up", "serve-alone"])
@pytest.mark.parametrize("allow", ["config.json", "*.json"], ids=["narrow", "wide"])
def test_a_pull_into_the_cache_of_the_hubs_client_uses_the_services(
    user: Shell, hub: Hub, commands: Sequence[tuple[str, ...]], allow: str
) -> None:
    sha = hub.repo("org/model").commit(MODEL)
    root = user.root / "hub"
    with services(user, commands):
        user.told("bdn", "pull", "hf://org/model", "--allow", allow, "--hub-cache", str(root))
        with pytest.raises(IncompleteSnapshotError):
            snapshot_download("org/model", cache_dir=root, local_files_only=True)
        user.told("bdn", "pull", "hf://org/model", "--hub-cache", str(root))
        hub.log.clear()
        user.told("bdn", "pull", f"hf://org/model@{sha}", "--allow", allow, "--offline", "--hub-cache", str(root))
        assert hub.log.count() == 0

    found = snapshot_download("org/model", cache_dir=root, local_files_only=True)
    assert tree(Path(found)) == MODEL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["ended", "killed"])
def test_a_pull_says_that_the_services_have_stopped_and_the_next_one_does_without_them(
    user: Shell, hub: Hub, number: signal.Signals
) -> None:
    hub.repo("org/model").commit(MODEL)
    log = user.root / "bdn-pull.log"
    with services(user, UP) as (up,):
        hub.fail(stall(), origin="cdn")
        with user.running("bdn", "pull", "hf://org/model", "out", "--json") as pull:
            wait_until(lambda: hub.log.count(origin="cdn"), seconds=120, what="the pull's request")
            up.send_signal(number)
            assert pull.wait(120) == 1, log.read_text()
    said = log.read_text()
    assert "STORE_UNAVAILABLE" in said
    assert "bdn up (process" in said
    assert "has stopped or does not answer" in said
    assert not (user.root / "out").exists()
    hub.release_stalled()

    assert (number == signal.SIGKILL) == ("url" in lock_of(user))  # nobody could take it back
    again = user.run("bdn", "pull", "hf://org/model", "out")
    assert (again.code, tree(user.root / "out")) == (0, MODEL), again.err


def test_a_service_that_takes_tokens_takes_that_of_the_pull(user: Shell, hub: Hub) -> None:
    hub.repo("org/model").commit(MODEL)
    tokens = {"BDN_AUTH": "token", "BDN_TOKEN": "t" * 32}
    with services(replace(user, extra={**user.extra, **tokens}), UP):
        pulled = user.run("bdn", "pull", "hf://org/model", "out", BDN_TOKEN="t" * 32)
        assert (pulled.code, tree(user.root / "out")) == (0, MODEL), pulled.err
        for wrong in ("", "w" * 32):
            refused = user.run("bdn", "pull", "hf://org/model", "other", "--json", BDN_TOKEN=wrong)
            assert refused.document["error"]["code"] == "UNAUTHENTICATED"


def test_a_pull_waits_until_services_that_start_can_be_used(user: Shell, hub: Hub) -> None:
    hub.repo("org/model").commit(MODEL)
    with user.running("bdn", "up"):
        wait_until((user.data / "mirror.lock").exists, seconds=120, what="the lock")
        pulled = user.run("bdn", "pull", "hf://org/model", "out")
    assert (pulled.code, tree(user.root / "out")) == (0, MODEL), pulled.err
