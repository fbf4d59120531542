"""Launchers: pure functions from a container to the argument vector that starts it, with ``start.sh`` as process 1."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bdn.core.training.environment import WORKSPACE
from bdn.settings import SettingsError
from bdn.wire.run_schema import LauncherName

RUN_PLACE: Final = "/b10/run"
LOGIN_FILE: Final = "config.json"
_ANSWER_SECONDS: Final = 20
_PATH: Final = "/root/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SANDBOX_VARIABLES: Final = {
    "PATH": _PATH,
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PIP_USER": "1",
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
}
# User 0 of the sandbox may read every file of the agent's user, so it sees no others of /etc: these are names, resolver,
# certificates, loader and time zone.
_ETC: Final = (
    *("passwd", "group", "hosts", "nsswitch.conf", "resolv.conf", "gai.conf", "services", "protocols", "host.conf"),
    *("ssl/certs", "ssl/openssl.cnf", "ca-certificates", "ca-certificates.conf", "pki/tls/certs", "pki/ca-trust"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "timezone"),
)
# Settings of the whole machine, writable for user 0 without any capability; bubblewrap itself leaves them so.
_PROC: Final = ("sys", "sysrq-trigger", "acpi", "driver", "fs", "scsi")
_GPU_DEVICES: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps")


@dataclass(frozen=True, slots=True)
class Bind:
    """A directory of this machine, shown to the container at ``place``."""

    source: Path
    place: str
    is_writable: bool = False


@dataclass(frozen=True, slots=True)
class Container:
    """``home`` is the home directory where the launcher has no image. ``login``: a folder with the registry's login.

    ``working_dir`` None: the image's own directory. ``is_root``: of the agent. ``has_scopes``: systemd runs here.
    """

    name: str
    binds: tuple[Bind, ...]
    home: Path
    image: str | None = None
    working_dir: str | None = WORKSPACE
    cpus: int | None = None
    memory_bytes: int | None = None
    gpus: tuple[int, ...] = ()
    login: Path | None = None
    has_infiniband: bool = False
    is_root: bool = True
    has_scopes: bool = False

    @property
    def script(self) -> list[str]:
        return [] if self.working_dir is None else [self.working_dir]


def podman(container: Container) -> list[str]:
    login = [] if container.login is None else ["--authfile", str(container.login / LOGIN_FILE)]
    gpus = [part for gpu in container.gpus for part in ("--device", f"nvidia.com/gpu={gpu}")]
    return ["podman", "run", *login, *_engine_arguments(container, gpus)]


def docker(container: Container) -> list[str]:
    login = [] if container.login is None else ["--config", str(container.login)]
    # Docker reads the value as CSV: without the quotes only the first device would belong to it.
    gpus = ["--gpus", f'"device={",".join(map(str, container.gpus))}"'] if container.gpus else []
    return ["docker", *login, "run", *_engine_arguments(container, gpus)]


def _engine_arguments(container: Container, gpus: list[str]) -> Iterator[str]:
    yield from ("--detach", "--name", container.name, "--network", "host", "--user", "0:0")
    if container.cpus is not None:
        yield from ("--cpus", str(container.cpus))
    if container.memory_bytes is not None:
        yield from ("--memory", str(container.memory_bytes), "--shm-size", str(container.memory_bytes // 2))
    yield from gpus
    if container.has_infiniband:
        yield from ("--device", "/dev/infiniband", "--ulimit", "memlock=-1")
    for bind in container.binds:
        yield from ("--volume", f"{bind.source}:{bind.place}{'' if bind.is_writable else ':ro'}")
    yield from ("--entrypoint", f"{RUN_PLACE}/start.sh", "--", container.image or "", *container.script)


def bwrap(container: Container) -> list[str]:
    return [*_scope(container), "bwrap", *_sandbox_arguments(container)]


def _scope(container: Container) -> Iterator[str]:
    """A cgroup of its own, which outlives the agent's and enforces the limits."""
    if container.has_scopes and container.is_root:
        yield from ("systemd-run", "--scope", "--quiet", "--collect", f"--unit={container.name}")
        if container.memory_bytes is not None:
            yield f"--property=MemoryMax={container.memory_bytes}"
        if container.cpus is not None:
            yield f"--property=CPUQuota={container.cpus}00%"


def _sandbox_arguments(container: Container) -> Iterator[str]:
    yield from ("--info-fd", "3", "--unshare-pid", "--as-pid-1", "--unshare-ipc", "--unshare-uts", "--new-session")
    # With root's capabilities a job could mount its weights again, writable, and write into the cache.
    yield from ("--cap-drop", "ALL")
    if not container.is_root:
        yield from ("--unshare-user", "--uid", "0", "--gid", "0")
    yield "--clearenv"
    for name, value in _SANDBOX_VARIABLES.items():
        yield from ("--setenv", name, value)
    yield from ("--tmpfs", "/", "--ro-bind", "/usr", "/usr", "--ro-bind-try", "/opt", "/opt")
    for name in ("bin", "sbin", "lib", "lib64"):
        yield from ("--symlink", f"usr/{name}", f"/{name}")
    for name in _ETC:
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
    yield from ("--proc", "/proc", "--dev", "/dev")
    for name in _PROC:
        yield from ("--ro-bind-try", f"/proc/{name}", f"/proc/{name}")
    named = [f"nvidia{gpu}" for gpu in container.gpus] + list(_GPU_DEVICES if container.gpus else ())
    for device in named + (["infiniband"] if container.has_infiniband else []):
        yield from ("--dev-bind-try", f"/dev/{device}", f"/dev/{device}")
    home = Bind(container.home, "/root", is_writable=True)
    for bind in sorted((home, *container.binds), key=lambda one: one.place.count("/")):  # outer places first
        yield from ("--bind" if bind.is_writable else "--ro-bind", str(bind.source), bind.place)
    yield from ("--chdir", "/root", "--remount-ro", "/", f"{RUN_PLACE}/start.sh", *container.script)


LAUNCHERS: Final[Mapping[LauncherName, Callable[[Container], list[str]]]] = {
    "podman": podman,
    "docker": docker,
    "bwrap": bwrap,
}


def answering_launcher(wanted: LauncherName | None) -> LauncherName:
    """The wanted launcher, or the first that works here. Blocking. Raises ``SettingsError`` if there is none."""
    problems = []
    for name in LAUNCHERS if wanted is None else (wanted,):
        if (problem := _problem(name)) is None:
            return name
        problems.append(f"{name}: {problem}")
    setting = "BDN_AGENT_ROLES: job needs a launcher" if wanted is None else "BDN_AGENT_JOB_LAUNCHER: it does not work"
    raise SettingsError(
        f"{setting} ({'; '.join(problems)}). Install podman, docker or bubblewrap, or leave job out of BDN_AGENT_ROLES"
    )


def _problem(name: LauncherName) -> str | None:
    if shutil.which(name) is None:
        return "not installed"
    user = [] if os.geteuid() == 0 else ["--unshare-user", "--uid", "0", "--gid", "0"]
    sandbox = ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--unshare-pid", "--cap-drop", "ALL", *user]
    command = ["bwrap", *sandbox, "true"] if name == "bwrap" else [name, "info"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)  # noqa: S603 - constants
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.strip().splitlines() or ["it failed"])[-1] if done.returncode else None
