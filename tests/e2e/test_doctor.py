"""``bdn doctor``: what it reports with and without services, and that it leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.doubles.hub import Hub
from tests.e2e.test_pull_beside_services import FREE_PORTS, UP, lock_of, services
from tests.support.agent.mounts import mounted_tmpfs, needs_mounts
from tests.support.content.noise import MIB, noise
from tests.support.crash.killing_steps import Fuse, dies_at
from tests.support.crash.refusing_kernel import CALLS, IS_KNOWN_MACHINE, refuse
from tests.support.network.authority import new_authority
from tests.support.services.commands import Finished, Shell
from tests.support.services.ordinary import ordinary_user

pytestmark = pytest.mark.embedded("an agent and a mirror of one machine")
SCHEMA: Final = {
    "type": "object",
    "additionalProperties": False,
    "required": ["level", "findings"],
    "properties": {
        "level": {"enum": ["ok", "note", "problem"]},
        "findings": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["check", "level", "message", "advice", "facts"],
                "properties": {
                    "check": {"type": "string", "minLength": 1},
                    "level": {"enum": ["ok", "note", "problem"]},
                    "message": {"type": "string", "minLength": 1},
                    "advice": {"type": ["string", "null"]},
                    "facts": {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "null"]}},
                },
                "if": {"properties": {"level": {"const": "ok"}}},
                "then": {"properties": {"advice": {"type": "null"}}},
                "else": {"properties": {"advice": {"type": "string", "minLength": 1}}},
            },
        },
    },
}  # fmt: skip
ALWAYS: Final = {
    "kernel", "memory", "open files", "cache", "group sync", "direct I/O", "reflinks", "mounts", "job volumes", "launcher",
    "store", "egress", "proxies", "hub", "mirror", "clock", "agent", "bottleneck",
}  # fmt: skip


def found(done: Finished) -> dict[str, dict[str, Any]]:
    """The findings by check; the exit code fits them."""
    assert "Traceback" not in done.err, done.err
    document = done.document
    jsonschema.validate(document, SCHEMA)
    findings = document["findings"]
    levels = {one["level"] for one in findings}
    assert (done.code, document["level"] == "problem") == ((1, True) if "problem" in levels else (0, False)), done.out
    return {one["check"]: one for one in findings}


def problems(done: Finished) -> list[str]:
    return [one["check"] for one in found(done).values() if one["level"] == "problem"]


def paths(root: Path) -> set[Path]:
    return set(root.rglob("*"))


def test_doctor__no_service__examines_the_machine_and_leaves_nothing(shell: Shell) -> None:
    assert shell.environment  # makes the home directory
    before = paths(shell.root)

    done = shell.run("bdn", "doctor", "--json", BDN_AGENT_CACHE_BYTES="30GB", BDN_AGENT_HEADROOM_BYTES="0")

    assert found(done).keys() >= ALWAYS
    assert problems(done) == []
    assert (found(done)["mirror"]["level"], found(done)["agent"]["level"]) == ("note", "note")
    rates = found(done)["bottleneck"]["facts"]
    assert rates["write_bytes_per_second"] > 0
    assert rates["read_bytes_per_second"] > 0
    assert rates["network_bytes_per_second"] is None
    assert done.err == ""
    assert paths(shell.root) == before


def test_doctor__lines__fit_one_screen_and_quiet_prints_problems_alone(shell: Shell) -> None:
    said = shell.run("bdn", "doctor", "--no-measure")
    quiet = shell.run("bdn", "doctor", "--no-measure", "--quiet", BDN_URL="http://127.0.0.1:1")

    lines = said.out.splitlines()
    assert len(lines) <= 40
    assert "not measured" in lines[-2]
    assert [line.split()[0] for line in quiet.out.splitlines()] == ["problem", "->"]
    assert quiet.code == 1


def test_doctor__services_run__reports_them_and_finds_the_bottleneck(shell: Shell, hub: Hub) -> None:
    hub.repo("org/model").commit({"config.json": b"{}", "model.safetensors": noise(9 * MIB + 1, 2)})
    user = Shell(shell.root, {**shell.extra, **FREE_PORTS}, is_forked=True)
    with services(user, UP):
        url = lock_of(user)["url"]
        assert user.run("bdn", "mirror", "hf://org/model", "--wait", BDN_URL=url).code == 0

        done = user.run("bdn", "doctor", "--json", BDN_URL=url)

    assert problems(done) == []
    report = found(done)
    assert [report[name]["level"] for name in ("mirror", "clock", "agent", "bottleneck")] == ["ok"] * 4, done.out
    assert (report["mirror"]["facts"]["ready"], report["mirror"]["facts"]["mirrors_running"]) == (True, 0)
    assert (report["agent"]["facts"]["ready"], report["agent"]["facts"]["stages_filling"]) == (True, 0)
    assert report["agent"]["facts"]["budget_bytes"] > 0
    rates = report["bottleneck"]["facts"]
    assert rates["slowest"] in {"disk writes", "disk reads", "network to the mirror"}
    assert rates["network_bytes_per_second"] > 0


def test_doctor__token_is_refused__is_a_problem_without_the_token(shell: Shell) -> None:
    user = Shell(shell.root, {**shell.extra, **FREE_PORTS, "BDN_AUTH": "token", "BDN_TOKEN": "sesame"}, is_forked=True)
    with services(user, [("bdn", "serve")]):
        url = lock_of(user)["url"]
        right = user.run("bdn", "doctor", "--json", "--no-measure", BDN_URL=url)
        wrong = user.run("bdn", "doctor", "--json", "--no-measure", BDN_URL=url, BDN_TOKEN="not-sesame")

    assert found(right)["mirror"]["level"] == "ok"
    assert found(wrong)["mirror"]["level"] == "problem"
    assert "sesame" not in right.out + right.err + wrong.out + wrong.err


def test_doctor__token_of_an_agent__notes_what_it_cannot_check(shell: Shell, hub: Hub) -> None:
    hub.repo("org/model").commit({"config.json": b"{}"})
    user = Shell(shell.root, {**shell.extra, **FREE_PORTS, "BDN_AUTH": "token", "BDN_TOKEN": "sesame"}, is_forked=True)
    with services(user, [("bdn", "serve")]):
        url = lock_of(user)["url"]
        token = user.run(
            "bdn-admin",
            "tokens",
            "create",
            "node-1",
            "--organisation",
            "default",
            "--role",
            "agent",
            "--json",
            BDN_URL=url,
        )
        done = user.run("bdn", "doctor", "--json", BDN_URL=url, BDN_TOKEN=token.document["token"])

    report = found(done)
    assert problems(done) == []
    for check in ("mirror", "bottleneck"):
        assert report[check]["level"] == "note"
        assert "a token of role agent may not do this: use a token of role controller" in report[check]["message"]
    assert report["mirror"]["facts"]["ready"]


WRONG_SETTINGS: Final = [
    ({"BDN_URL": "ftp://me:se@s/ame@host"}, "BDN_URL"),
    ({"BDN_URL": "http://me:se@same@127.0.0.1:1"}, "mirror"),
    ({"BDN_JOBS": "none"}, "BDN_JOBS"),
    ({"BDN_AGENT_CACHE_BYTES": "much"}, "BDN_AGENT_CACHE_BYTES"),
    ({"BDN_AGENT_ROLES": "job"}, "BDN_AGENT_ROLES"),
    ({"BDN_CONFIG": "/nowhere/bdn.toml"}, "BDN_CONFIG"),
    ({"BDN_TLS_CA": "/nowhere/ca.pem"}, "BDN_TLS_CA"),
    ({"BDN_TLS_CERT": "/nowhere/cert.pem"}, "BDN_TLS_CERT"),
    ({"BDN_AGENT_TLS_CERT": "/nowhere/cert.pem", "BDN_AGENT_TLS_KEY": "/nowhere/key.pem"}, "BDN_AGENT_TLS_CERT"),
    ({"BDN_AGENT_SOCKET": "/nowhere/agent.sock"}, "agent"),
    ({"BDN_AGENT_JOB_LAUNCHER": "docker", "PATH": "/nowhere"}, "launcher"),
    ({"HTTPS_PROXY": "socks5://me:se@same@proxy:1"}, "HTTPS_PROXY"),
    ({"SSL_CERT_FILE": "/nowhere/ca.pem"}, "SSL_CERT_FILE"),
    ({"HF_ENDPOINT": "huggingface"}, "HF_ENDPOINT"),
]


@pytest.mark.parametrize(("wrong", "named"), WRONG_SETTINGS, ids=[named for _, named in WRONG_SETTINGS])
def test_doctor__wrong_setting__is_a_problem_that_names_it(shell: Shell, wrong: dict[str, str], named: str) -> None:
    done = Shell(shell.root, {**shell.extra, **wrong}, is_forked=True).run("bdn", "doctor", "--json", "--no-measure")

    named_in = [f"{one['check']} {one['message']}" for one in found(done).values() if one["level"] == "problem"]
    assert any(named in said for said in named_in), done.out
    assert "same" not in done.out + done.err
    assert "ame@" not in done.out + done.err
    assert "kernel" in found(done)


def test_doctor__several_wrong_settings__names_them_all_once(shell: Shell) -> None:
    done = shell.run("bdn", "doctor", "--json", BDN_URL="ftp://host", BDN_JOBS="none", BDN_AGENT_PORT="many")

    said = [one["message"] for one in done.document["findings"] if one["check"] == "settings"]
    assert sorted(line.partition(":")[0] for line in said) == ["BDN_AGENT_PORT", "BDN_JOBS", "BDN_URL"]
    assert done.code == 1


def test_doctor__hub_variables_and_proxies__are_shown_without_passwords(shell: Shell) -> None:
    done = shell.run(
        "bdn", "doctor", "--json", "--no-measure",
        HF_HOME="/models/hub", HF_HUB_OFFLINE="1", HF_TOKEN="hf_sesame", HTTPS_PROXY="me:se@same@proxy.example:3128",
        HF_ENDPOINT="http://me:sesame@hub.example",
    )  # fmt: skip

    hub, proxies = found(done)["hub"], found(done)["proxies"]
    assert (hub["level"], hub["facts"]["HF_HOME"], hub["facts"]["hub_cache"]) == (
        "note", "/models/hub", "/models/hub/hub",
    )  # fmt: skip
    assert proxies["facts"] == {"https_proxy": "proxy.example:3128"}
    assert "same" not in done.out + done.err


def test_doctor__certificate__is_reported_with_its_end(shell: Shell) -> None:
    for name in ("authority", "server"):
        (shell.root / name).mkdir()
    chain, key = new_authority(shell.root / "authority", "localhost").issue(shell.root / "server", "localhost")
    pair = {"BDN_TLS_CERT": str(chain), "BDN_TLS_KEY": str(key)}

    done = Shell(shell.root, {**shell.extra, **pair}, is_forked=True).run("bdn", "doctor", "--json", "--no-measure")

    certificate = found(done)["certificate of BDN_TLS_CERT"]
    assert certificate["level"] in ("ok", "note")
    assert certificate["facts"]["left_seconds"] > 0


@needs_mounts
def test_doctor__full_disk__is_a_problem(shell: Shell) -> None:
    with mounted_tmpfs(shell.root / "small", "1m") as small:
        with pytest.raises(OSError, match="No space"):
            (small / "filler").write_bytes(bytes(2 * MIB))
        done = shell.run("bdn", "doctor", "--json", BDN_DATA_DIR=str(small))
        assert [path.name for path in small.iterdir()] == ["filler"]

    assert {"cache", "cache directory", "store"} <= set(problems(done))
    assert found(done)["bottleneck"]["facts"]["write_bytes_per_second"] is None


@needs_mounts
@pytest.mark.parametrize(
    ("mode", "exists", "level"),
    [(0o777, False, None), (0o755, True, "note"), (0o755, False, "problem")],
    ids=["writable", "of-the-agent", "absent-and-forbidden"],
)
def test_doctor__ordinary_user__examines_what_it_may(mode: int, exists: bool, level: str | None) -> None:
    with ordinary_user(BDN_URL="http://127.0.0.1:1") as user:
        place = user.root / "place"
        place.mkdir()
        place.chmod(mode)
        if exists:
            (place / "cache").mkdir()
        before = paths(user.root)

        done = user.run("bdn", "doctor", "--json", BDN_AGENT_CACHE_DIR=str(place / "cache"))

        assert paths(user.root) == before
    report = found(done)
    assert report["kernel"]["level"] in ("ok", "note")
    if level is None:
        assert report["job volumes"]["facts"]["bound"] == "watch"
        assert report["bottleneck"]["facts"]["write_bytes_per_second"] > 0
    else:
        assert report["disk probes"]["level"] == level, done.out
        assert report["bottleneck"]["facts"]["write_bytes_per_second"] is None


KILLED_AT: Final = {
    "probes": "import node_agent.doctor as it\nit.can_clone = lambda *_: os.kill(os.getpid(), signal.SIGKILL)",
    "measurement": "os.fdatasync = lambda _: os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("when", KILLED_AT)
def test_doctor__killed__leaves_no_file_and_the_next_run_no_folder(shell: Shell, when: str) -> None:
    shell.data.mkdir()
    code = f"import os, signal, sys\n{KILLED_AT[when]}\nfrom node_agent.doctor import examine\nexamine(measure=True)"
    died = subprocess.run([sys.executable, "-c", code], env=shell.environment, check=False)

    assert died.returncode == -signal.SIGKILL
    assert [path for path in shell.data.rglob("*") if path.is_file()] == []
    assert len(list(shell.data.iterdir())) == (1 if when == "probes" else 0)
    assert shell.run("bdn", "doctor", "--json", "--no-measure").code == 0
    assert list(shell.data.iterdir()) == []


@pytest.mark.skipif(not IS_KNOWN_MACHINE, reason="numbers of system calls are known of x86_64 alone")
def test_doctor__sandbox_refuses_calls__reports_nevertheless(shell: Shell) -> None:
    def examine_in_a_sandbox(_: object) -> None:
        os.environ.update(shell.environment)
        for call in CALLS:
            refuse(call, 1)
        from node_agent.doctor import examine

        checks = {finding.check for finding in examine(measure=True).findings}
        assert checks >= {"kernel", "direct I/O", "reflinks", "mounts", "job volumes"}

    assert not dies_at(Fuse.at(shell.root / "fuse"), examine_in_a_sandbox)
