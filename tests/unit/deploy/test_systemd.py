"""deploy/systemd: systemd accepts each unit, units are as closed as they can be, and their settings exist."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from bdn.mirror.settings import MirrorSettings
from bdn.settings import ClientSettings, FileSettings
from node_agent.settings import AgentSettings
from tests.support.services.commands import ROOT

UNITS: Final = ROOT / "deploy/systemd"
MOST_EXPOSED: Final = {"bdn-mirror": 1.5, "bdn-worker": 1.5, "bdn-agent": 4.0}  # of 10, by systemd-analyze security
# systemd.exec(5), MountFlags=: each of them gives a unit a mount namespace whose mounts do not reach jobs.
NAMESPACED: Final = {
    *(
        "BindPaths",
        "BindReadOnlyPaths",
        "DynamicUser",
        "ExecPaths",
        "InaccessiblePaths",
        "LoadCredential",
        "MountFlags",
    ),
    *("NoExecPaths", "PrivateDevices", "PrivateIPC", "PrivateMounts", "PrivateTmp", "PrivateUsers", "ProcSubset"),
    *("ProtectControlGroups", "ProtectHome", "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables"),
    *(
        "ProtectProc",
        "ProtectSystem",
        "ReadOnlyPaths",
        "ReadWritePaths",
        "RootDirectory",
        "RootImage",
        "TemporaryFileSystem",
    ),
}
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")


def settings_of(unit: str) -> list[tuple[str, str]]:
    text = (UNITS / f"{unit}.service").read_text()
    return re.findall(r"^([A-Za-z]+)=(.*)$", text, re.MULTILINE)


def analyzed(*arguments: str) -> str:
    done = subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_units__are_those_with_a_threshold() -> None:
    assert {path.stem for path in UNITS.glob("*.service")} == set(MOST_EXPOSED)


@needs_systemd
@pytest.mark.parametrize("unit", MOST_EXPOSED)
def test_unit__verified_by_systemd__has_no_remark(unit: str, tmp_path: Path) -> None:
    """An unknown key is a remark, and no failure. Programs are replaced: those of the unit are not on this machine."""
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", (UNITS / f"{unit}.service").read_text(), flags=re.MULTILINE)
    copy = tmp_path / f"{unit}.service"
    copy.write_text(text)
    assert analyzed("verify", "--man=no", str(copy)) == ""


@needs_systemd
@pytest.mark.parametrize(("unit", "most"), MOST_EXPOSED.items())
def test_unit__by_systemds_own_measure__is_not_more_exposed_than_it_has_to_be(unit: str, most: float) -> None:
    said = analyzed("security", "--offline=true", "--no-pager", str(UNITS / f"{unit}.service"))
    (level,) = re.findall(r"Overall exposure level for \S+: (\d+\.\d+)", said)
    assert float(level) <= most


def test_agent__has_no_mount_namespace_of_its_own() -> None:
    assert not NAMESPACED & {name for name, _ in settings_of("bdn-agent")}


@pytest.mark.parametrize("unit", MOST_EXPOSED)
def test_unit__starts_a_command_that_exists_as_a_user_that_is_not_root(unit: str) -> None:
    found = dict(settings_of(unit))
    program = Path(found["ExecStart"].split()[0])
    assert (program.parent, found["User"] != "root") == (Path("/opt/bdn/bin"), True)
    assert f"{program.name} =" in (ROOT / "pyproject.toml").read_text()
    assert int(found["TimeoutStopSec"]) > 30  # a drain ends before


@pytest.mark.parametrize("name", ["mirror", "agent"])
def test_environment_file__with_all_of_its_examples__is_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: dict[str, type[FileSettings]] = {"mirror": MirrorSettings, "agent": AgentSettings}
    program = programs[name]
    examples = dict(re.findall(r"^#?([A-Z][A-Z0-9_]*)=(.*)$", (UNITS / f"{name}.env").read_text(), re.MULTILINE))
    inline = [
        value for unit in MOST_EXPOSED if name in unit for key, value in settings_of(unit) if key == "Environment"
    ]
    examples |= dict(pair.split("=", 1) for pair in " ".join(inline).split())
    kinds: tuple[type[FileSettings], ...] = (program, ClientSettings)
    known = {kind.variable(field) for kind in kinds for field in kind.model_fields}
    unknown = {one for one in examples if one not in known and not one.startswith("BDN_INFRASTRUCTURE_SECRET_")}
    assert unknown == {"MALLOC_ARENA_MAX"}
    for variable, value in examples.items():
        monkeypatch.setenv(variable, value)
    settings = program()
    assert settings.model_dump()["auth"] == "token"


def test_environment_files__belong_to_units_that_read_them() -> None:
    read = {value for unit in MOST_EXPOSED for key, value in settings_of(unit) if key == "EnvironmentFile"}
    assert read == {f"/etc/bdn/{path.name}" for path in UNITS.glob("*.env")}
