"""Likely mistakes end with one line that says what to do, and never with a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.agent.mounts import needs_mounts, read_only

PASSWORD = "sesame-sesame"
COMMANDS = {
    "migrate": "from bdn.cli.main import main; main(['migrate'])",
    "serve": "from bdn.cli.main import main; main(['serve', '--port', '0', '--data-port', '0'])",
    "agent": "from node_agent.__main__ import main; main([])",
}


def run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One Python program; what it ends with."""
    given = {**os.environ, "BDN_AGENT_DATA_PORT": "0", **environment}
    return subprocess.run([sys.executable, "-c", command], env=given, capture_output=True, text=True, check=False)


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert PASSWORD not in done.stderr
    for word in words:
        assert word in done.stderr.lower(), done.stderr


@pytest.mark.parametrize("program", COMMANDS)
def test_a_data_directory_that_is_a_file_is_named(tmp_path: Path, program: str) -> None:
    file = tmp_path / "file"
    file.touch()

    refused(run(COMMANDS[program], BDN_DATA_DIR=str(file)), 1, str(file).lower(), "bdn_data_dir", "[disk_failed]")


@needs_mounts
@pytest.mark.parametrize("program", ["migrate", "serve"])
def test_a_data_directory_that_cannot_be_written_to_is_named(tmp_path: Path, program: str) -> None:
    with read_only(tmp_path):
        refused(run(COMMANDS[program], BDN_DATA_DIR=str(tmp_path / "data")), 1, str(tmp_path).lower(), "read-only")


@pytest.mark.parametrize(("url", "code", "words"), [
    (f"postgresql://u:{PASSWORD}@127.0.0.1:1/x?sslmode=disable", 1, ["refused", "[store_unavailable]"]),
    (f"postgresql://u:{PASSWORD}@127.0.0.1:1/x?colour=red", 2, ["colour", "[invalid_request]"]),
    (f"mysql://u:{PASSWORD}@127.0.0.1:1/x", 2, ["mysql", "postgresql://"]),
    (f"u:{PASSWORD}@127.0.0.1", 2, ["postgresql://"]),
    (f"postgresql://u:{PASSWORD}@host:port/x", 2, ["postgresql://"]),
])  # fmt: skip
def test_an_address_of_a_database_that_cannot_be_is_refused(url: str, code: int, words: list[str]) -> None:
    refused(run(COMMANDS["migrate"], BDN_DATABASE_URL=url), code, *words)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_pipe_that_nobody_reads_ends_a_command_in_silence(tmp_path: Path, options: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = f"from bdn.cli.admin import main; main(['secrets', 'new-key', *{options}])"
    done = subprocess.run([sys.executable, "-c", command], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)

    assert (done.returncode, done.stderr) == (1, b"")
