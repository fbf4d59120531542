"""The wheel in an environment of its own: what ``pip install .`` and ``uvx --from .`` give to a user."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.doubles.hub import Hub
from tests.support.content.trees import tree
from tests.support.services.commands import ROOT, SCRIPTS, Shell

PYTHON: Final = ROOT / ".venv-runtime/bin/python"  # with requirements/runtime.txt alone
FILES: Final = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 4096}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The wheel of this checkout."""
    wheels, installed = tmp_path / "wheels", tmp_path / "installed"
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", wheels], cwd=ROOT, check=True)
    uv = [str(SCRIPTS / "uv"), "pip", "install", "-q", "--offline", "--no-deps", "--python", str(PYTHON)]
    subprocess.run([*uv, "--target", installed, *wheels.iterdir()], check=True)
    return installed


@pytest.mark.skipif(not PYTHON.exists(), reason="the environment is not there; make test installs it")
@pytest.mark.embedded("the wheel is the same for every database and store")
def test_wheel__with_the_locked_dependencies_alone__pulls_a_repository(
    installed: Path, shell: Shell, hub: Hub, tmp_path: Path
) -> None:
    hub.repo("org/model").commit(FILES)
    environment = {**shell.environment, "PYTHONPATH": str(installed)}

    for program in ("bdn", "bdn-admin", "bdn-node-agent"):
        subprocess.run([installed / "bin" / program, "--help"], env=environment, check=True, stdout=subprocess.PIPE)
    pull = [str(installed / "bin/bdn"), "pull", "hf://org/model", "out"]
    subprocess.run(pull, env=environment, cwd=tmp_path, check=True)

    assert tree(tmp_path / "out") == FILES
    client = 'from bdn.client import Client; Client().pull("hf://org/model", "from-python")'
    subprocess.run([PYTHON, "-c", client], env=environment, cwd=tmp_path, check=True)
    assert tree(tmp_path / "from-python") == FILES
    assert (installed / "bdn/py.typed").exists()
    page = "from bdn.mirror.page.rendering import Assets, Templates as T; print(T(Assets()).page('login.html', {'destination': '', 'problem': ''}))"
    shown = subprocess.run([PYTHON, "-c", page], env=environment, cwd=tmp_path, check=True, stdout=subprocess.PIPE)
    assert b"<h1>Log in</h1>" in shown.stdout
    assert (installed / "bdn/mirror/page/assets/htmx.LICENSE").exists()
