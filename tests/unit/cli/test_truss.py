"""``bdn truss`` around a program named truss that says what it was given."""

import os
import signal
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from bdn.cli.main import main
from bdn.cli.truss import environment_of
from tests.support.services.commands import Shell, wait_until

SCRIPT: Final = """#!/bin/sh
env >"$0.env"
printf '%s\\n' "$@" >"$0.arguments"
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first truss in PATH."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "truss"


def run(program: Path, end: str, *arguments: str) -> int:
    program.write_text(SCRIPT + end)
    program.chmod(0o755)
    return CliRunner().invoke(main, ["truss", *arguments]).exit_code


@pytest.mark.parametrize(("end", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_the_exit_code__is_that_of_truss(program: Path, end: str, code: int) -> None:
    assert run(program, end) == code


def test_arguments__reach_truss_as_they_are(program: Path) -> None:
    run(program, "exit 0", "train", "push", "-h", "--json", "--", "a b", "-q")
    assert Path(f"{program}.arguments").read_text().splitlines() == ["train", "push", "-h", "--json", "--", "a b", "-q"]
    run(program, "exit 0", "--version")
    assert Path(f"{program}.arguments").read_text() == "--version\n"


def test_truss__is_given_the_mirror_as_its_remote_and_the_forwarder_as_its_proxy(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "localhost")
    monkeypatch.setenv("BDN_TOKEN", "bdn_token")
    run(program, "exit 0")
    given = dict(line.partition("=")[::2] for line in Path(f"{program}.env").read_text().splitlines())
    assert given["BASETEN_TRUSS_AUTH_REMOTE_URL"] == "http://localhost:8000"
    assert given["BASETEN_TRUSS_AUTH_API_KEY"] == "bdn_token"
    assert given["HTTP_PROXY"] == given["http_proxy"]
    assert given["http_proxy"].startswith("http://127.0.0.1:")
    assert not {"NO_PROXY", "no_proxy"} & given.keys()


def test_an_environment__loses_what_leads_past_the_forwarder_and_keeps_the_rest() -> None:
    proxies = {"ALL_PROXY": "http://all", "all_proxy": "http://all", "NO_PROXY": "*", "HTTP_PROXY": "http://caller"}
    kept = {"HTTPS_PROXY": "http://caller", "HOME": "/home"}
    assert environment_of(proxies | kept, "http://forwarder", None) == kept | {
        "BASETEN_TRUSS_AUTH_REMOTE_URL": "http://localhost:8000",
        "BASETEN_TRUSS_AUTH_API_KEY": "off",
        "HTTP_PROXY": "http://forwarder",
        "http_proxy": "http://forwarder",
    }


def test_without_truss__the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(main, ["truss", "train", "view"])
    assert done.exit_code == 2
    assert "pip install truss" in done.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal__lets_truss_decide_how_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    (program := tmp_path / "truss").write_text(
        f"#!/bin/sh\ntrap 'exit 5' TERM\n: >{tmp_path}/ready\nuntil [ -e {tmp_path}/go ]; do sleep 0.05; done\nexit 6\n"
    )
    program.chmod(0o755)
    shell = Shell(tmp_path, {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, is_forked=True)
    with shell.running("bdn", "truss") as process:
        wait_until((tmp_path / "ready").exists)
        process.send_signal(number)
        if number == signal.SIGINT:  # which a terminal sends to both, and this truss ignores
            (tmp_path / "go").touch()
        assert process.wait(120) == {signal.SIGTERM: 5, signal.SIGINT: 6}[number]
