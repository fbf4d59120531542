"""A Slurm cluster of one controller and two nodes, from unpacked Debian packages, in namespaces of its own."""

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from tests.support.network.ports import free_port
from tests.support.services.commands import ROOT, Finished

PROGRAMS: Final = ROOT / ".slurm"
NODES: Final = ("n1", "n2")
_HOST: Final = "slurm-rig"  # of the namespace; slurmd and srun resolve it
_LIBRARIES: Final = sorted(PROGRAMS.glob("usr/lib/*-linux-gnu*"))
_INSIDE: Final = (
    "unshare",
    "--mount",
    "--pid",
    "--uts",
    "--ipc",
    "--fork",
    "--kill-child=KILL",
    "--propagation=private",
)


def _reason() -> str | None:
    """Why no cluster can run here. The programs come from ``make slurm-programs``."""
    if os.geteuid() != 0:
        return "slurmd runs as root"
    if not (PROGRAMS / ".ready").exists():
        return "no Slurm in .slurm: make slurm-programs unpacks it"
    if subprocess.run([*_INSIDE, "true"], capture_output=True, check=False).returncode != 0:
        return "no namespaces here"
    return None


def needs_slurm() -> pytest.MarkDecorator:
    reason = _reason()
    return pytest.mark.skipif(reason is not None, reason=reason or "")


@dataclass
class SlurmCluster:
    """Daemons and commands run inside one mount, process and UTS namespace, and end with it. Sockets are on loopback."""

    root: Path
    settings: dict[str, str] = field(default_factory=dict)  # lines of slurm.conf
    init: int = 0
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def inside(self) -> tuple[str, ...]:
        """What comes before a command that runs in the namespaces."""
        return ("nsenter", f"--target={self.init}", "--mount", "--pid", "--uts", "--ipc", "--")

    @property
    def environment(self) -> dict[str, str]:
        libraries = [str(one) for folder in _LIBRARIES for one in (folder, folder / "slurm-wlm")]
        return {
            "PATH": f"{PROGRAMS}/usr/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": ":".join(libraries),
            "SLURM_CONF": str(self.root / "slurm.conf"),
        }

    def user(self, name: str, *command: str, given: str = "", **environment: str) -> Finished:
        """Run a command as this user of the machine, in a directory of the user's own."""
        account = pwd.getpwnam(name)
        home = self.root / "home" / name
        home.mkdir(parents=True, exist_ok=True)
        os.chown(home, account.pw_uid, account.pw_gid)
        done = subprocess.run(
            [
                *self.inside,
                *("setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups", "--"),
                *("env", "-C", str(home), *command),
            ],
            env=self.environment | environment,
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    def submit(self, user: str, script: str, *options: str) -> str:
        """The id of a batch job, whose output is ``out-<id>`` in the user's directory."""
        done = self.user(user, "sbatch", "--parsable", "--output=out-%j", *options, given=f"#!/bin/sh\n{script}\n")
        assert done.code == 0, done.err
        return done.out.strip()

    def output(self, user: str, job_id: str) -> str:
        return (self.root / "home" / user / f"out-{job_id}").read_text()

    def await_job(self, job_id: str, *states: str) -> dict[str, str]:
        """The job, once it has one of these states, and its nodes are free if the state is its last."""
        self.wait(lambda: self.job(job_id)["JobState"] in states, f"job {job_id} to be {' or '.join(states)}")
        return self.job(job_id)

    def await_nodes(self, *states: str) -> None:
        """Until the nodes have these states, in their order."""
        self.wait(lambda: self.node_states() == dict(zip(NODES, states, strict=True)), f"nodes that are {states}")

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 180) -> None:
        """Polls commands, which are processes."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"no {what}\n{self.root_command('squeue').out}{self.node_states()}"
            time.sleep(0.2)

    def root_command(self, *command: str) -> Finished:
        done = subprocess.run(
            [*self.inside, *command], env=self.environment, capture_output=True, text=True, check=False, timeout=300
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of a job as the controller shows them."""
        shown = self.root_command("scontrol", "show", "job", "-o", job_id).out
        return dict(part.split("=", 1) for part in shown.split() if "=" in part)

    def node_states(self) -> dict[str, str]:
        lines = self.root_command("sinfo", "-h", "-N", "-o", "%N %T").out.split("\n")
        return dict(line.split() for line in lines if line)

    def start_node(self, name: str) -> None:
        command = (f"{PROGRAMS}/usr/sbin/slurmd-wlm", "-D", "-N", name, "-d", f"{PROGRAMS}/usr/sbin/slurmstepd-wlm")
        self._daemon(name, *command)

    def crash_node(self, name: str, job_id: str) -> None:
        """slurmd and the steps of a job die at once, as when the machine stops; the controller notices it at once."""
        self.root_command("kill", "-KILL", (self.root / f"slurmd-{name}.pid").read_text().strip())
        self.root_command("pkill", "-KILL", "-f", rf"^slurmstepd: \[{job_id}\.")
        self.daemons[name].wait()
        self.root_command("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=crashed")

    def start(self) -> None:
        self._configure()
        self._daemon("munged", f"{PROGRAMS}/usr/sbin/munged", "--foreground", "--force", *self._munge_options())
        self.wait((self.root / "munge/public/socket").exists, "socket of munged")
        self._daemon("slurmctld", f"{PROGRAMS}/usr/sbin/slurmctld-wlm", "-D")
        for name in NODES:
            self.start_node(name)
        self.await_nodes("idle", "idle")

    def _munge_options(self) -> list[str]:
        munge = self.root / "munge"
        places = {
            "key-file": "key",
            "socket": "public/socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        return [f"--{option}={munge / name}" for option, name in places.items()]

    def stop(self) -> None:
        """Daemons end with their namespaces; these are the processes that wait for them."""
        for process in self.daemons.values():
            process.kill()
            process.wait()

    def _daemon(self, name: str, *command: str) -> None:
        with (self.root / "log" / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                [*self.inside, *command], env=self.environment, stdout=log, stderr=log
            )

    def _configure(self) -> None:
        for folder in ("munge/public", "state", "log", *(f"slurmd/{name}" for name in NODES)):
            (self.root / folder).mkdir(parents=True)
        (self.root / "munge").chmod(0o711)
        (self.root / "munge/key").write_bytes(secrets.token_bytes(128))
        (self.root / "munge/key").chmod(0o400)
        ports = {name: free_port() for name in NODES}
        lines = {
            "ClusterName": "bdn",
            "SlurmctldHost": f"{_HOST}(127.0.0.1)",
            "SlurmctldPort": str(free_port()),
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={self.root}/munge/public/socket",
            "CredType": "cred/munge",
            "PluginDir": ":".join(str(folder / "slurm-wlm") for folder in _LIBRARIES),
            "StateSaveLocation": f"{self.root}/state",
            "SlurmdSpoolDir": f"{self.root}/slurmd/%n",
            "SlurmctldPidFile": f"{self.root}/slurmctld.pid",
            "SlurmdPidFile": f"{self.root}/slurmd-%n.pid",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SwitchType": "switch/none",
            "MpiDefault": "none",
            "CommunicationParameters": "NoInAddrAny,NoCtldInAddrAny",
            "SlurmdParameters": "config_overrides",
            "ReturnToService": "2",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "KillWait": "2",
            "SlurmdDebug": "debug",
            "AccountingStorageType": "accounting_storage/none",
            "JobAcctGatherType": "jobacct_gather/none",
            **self.settings,
        }
        nodes = [
            f"NodeName={name} NodeHostname={_HOST} NodeAddr=127.0.0.1 Port={port} CPUs=1 State=UNKNOWN"
            for name, port in ports.items()
        ]
        partition = f"PartitionName=gpu Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP"
        text = "\n".join([*(f"{name}={value}" for name, value in lines.items()), *nodes, partition, ""])
        (self.root / "slurm.conf").write_text(text)
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


@contextmanager
def namespaces(root: Path) -> Iterator[int]:
    """The process id, as seen here, of the first process of new namespaces, which all others end with."""
    hosts = root / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {_HOST}\n")
    setup = f"hostname {_HOST} && mount -t proc proc /proc && mount --bind {hosts} /etc/hosts && echo ready && exec cat"
    command = [*_INSIDE, "sh", "-c", setup]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout
            assert holder.stdout.readline() == "ready\n"
            (child,) = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
            yield int(child)
        finally:
            holder.kill()


@contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary directory that all users of the machine can traverse, which those of pytest are not."""
    root = Path(tempfile.mkdtemp(prefix="bdn-slurm-"))
    root.chmod(0o755)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
