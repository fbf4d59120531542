"""The real podman with images and containers of its own, and an image that is made of this machine's programs."""

import json
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.support.agent.mounts import unmounting

IMAGE: Final = "localhost/bdn-test:1"
ONLY_IN_IMAGE: Final = "only_in_the_image"  # a module
_PROGRAMS: Final = ("cat", "cp", "id", "mount", "mv", "rm", "sleep", "unshare")
_LEFT_OUT: Final = frozenset({"__pycache__", "site-packages", "test", "idlelib", "tkinter", "lib2to3", "ensurepip"})

needs_podman = pytest.mark.skipif(
    shutil.which("podman") is None, reason="podman is not installed (as root: apt install podman runc)"
)


@dataclass(frozen=True)
class Podman:
    """Images, containers and settings are below ``root``."""

    root: Path

    @property
    def environment(self) -> dict[str, str]:
        """Leads other programs to the same containers."""
        return {f"CONTAINERS_{name}CONF": str(self._settings(name)) for name in ("", "STORAGE_", "REGISTRIES_")}

    def _settings(self, name: str) -> Path:
        return self.root / f"{name.lower()}containers.conf"

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": _path(), "HOME": str(self.root), **self.environment}
        return subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False, env=environment)

    def told(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def trust(self, registry: str) -> None:
        """Accept plain HTTP of this registry."""
        self._settings("REGISTRIES_").write_text(f'[[registry]]\nlocation = "{registry}"\ninsecure = true\n')

    def configure(self) -> None:
        engine = {"cgroup_manager": "cgroupfs", "events_logger": "none", "lock_type": "file"}
        engine |= {"tmp_dir": str(self.root / "tmp"), "image_copy_tmp_dir": "storage"}
        if shutil.which("runc"):  # crun refuses the hybrid hierarchy of cgroups
            engine["runtime"] = "runc"
        lines = ["[engine]", *(f'{name} = "{value}"' for name, value in engine.items())]
        lines += ["[containers]", 'log_driver = "k8s-file"', f"default_ulimits = {json.dumps(_limits())}"]
        self._settings("").write_text("\n".join(lines))
        places = {"graphroot": self.root / "storage", "runroot": self.root / "run"}
        storage = ["[storage]", 'driver = "overlay"', *(f'{name} = "{place}"' for name, place in places.items())]
        self._settings("STORAGE_").write_text("\n".join(storage))
        self._settings("REGISTRIES_").touch()


@contextmanager
def podman_with_image(root: Path) -> Iterator[Podman]:
    """A podman that has ``IMAGE``; skips the test if it can run no container here."""
    podman = Podman(root)
    podman.configure()
    with unmounting(root):
        try:
            tar = _tar_of_programs(root / "image.tar")
            path = f"ENV PATH={_python().parent}:/usr/bin:/bin"
            done = podman.run("import", "--quiet", "--change", path, str(tar), IMAGE)
            if done.returncode == 0:
                done = podman.run("run", "--rm", "--network", "host", "--memory", "64m", IMAGE, "id")
            if done.returncode:
                pytest.skip(f"podman can run no container here: {done.stderr.strip()}")
            yield podman
        finally:
            podman.run("rm", "--all", "--force")
            podman.run("rmi", "--all", "--force")


def _limits() -> list[str]:
    """Of processes in containers: no higher than ours, which not every root may raise, and than podman's own."""
    most = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    bound = int(Path("/proc/sys/kernel/pid_max").read_text())  # podman lowers its limit of processes to that
    found = {name: resource.getrlimit(one)[1] for name, one in most.items()}
    numbers = {name: bound if one == resource.RLIM_INFINITY else min(one, bound) for name, one in found.items()}
    return [f"{name}={number}:{number}" for name, number in numbers.items()]


def _path() -> str:
    return f"{Path(shutil.which('podman') or '').parent}:/usr/sbin:/usr/bin:/sbin:/bin"


def _python() -> Path:
    """The interpreter outside of any environment."""
    return Path(sys.executable).resolve()


def _tar_of_programs(path: Path) -> Path:
    """A root directory with a shell, a few programs, Python, and a module that is nowhere else."""
    python, library = _python(), Path(sysconfig.get_path("stdlib"))
    programs = [Path("/bin/sh"), python, *(Path(found) for name in _PROGRAMS if (found := shutil.which(name)))]
    libraries = {one for program in programs for one in _libraries(program)}
    with tarfile.open(path, "w", dereference=True) as tar:
        for place in ("dev", "etc", "proc", "root", "sys", "tmp"):
            _add(tar, place, tarfile.DIRTYPE)
        for file in (*programs, *map(Path, libraries)):
            tar.add(file, str(file))
        tar.add(library, str(library), filter=_needed)
        _add(tar, f"{library}/{ONLY_IN_IMAGE}.py", tarfile.REGTYPE)
        if python.name != "python3":
            _add(tar, str(python.with_name("python3")), tarfile.SYMTYPE, python.name)
    return path


def _add(tar: tarfile.TarFile, name: str, kind: bytes, target: str = "") -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.linkname = kind, 0o755, target
    tar.addfile(entry)


def _needed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = Path(entry.name).name
    return None if name in _LEFT_OUT or name.startswith("config-") else entry


def _libraries(program: Path) -> list[str]:
    told = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
    return re.findall(r"(/\S+) \(0x", told)
