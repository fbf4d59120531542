"""Runs the pods of a double of Kubernetes as a kubelet does: their containers are processes, their volumes are folders.

BDN's containers are the real ``bdn-rank``, and the job's own is a sandbox with its own processes. Containers share nothing but the
volumes that the manifest mounts in them.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any, Final, Self

from node_agent.run.launchers import RUN_PLACE, Bind, Container, bwrap
from tests.doubles.kubernetes import Issuer
from tests.doubles.kubernetes_api import NAMESPACE, ApiServer, set_state
from tests.support.network.egress import ALLOW_LOOPBACK
from tests.support.services.commands import ROOT
from tests.support.services.forked import Program, fork

_TICK_SECONDS: Final = 0.05
_TOKEN_FOLDER: Final = "/var/run/secrets/bdn"
Json = dict[str, Any]
Stage = Callable[[str, str, str, str], Path]  # pod's name, mirror, mount location and token: where the files are


class Kubelet(AbstractContextManager["Kubelet"]):
    """Of all nodes of ``api``. ``held``: nodes that start no container now. ``lost``: nodes that report nothing any more."""

    def __init__(self, api: ApiServer, issuer: Issuer, folder: Path, stage: Stage) -> None:
        self.api = api
        self.issuer = issuer
        self.folder = folder
        self.stage = stage
        self.held: set[str] = set()
        self.lost: set[str] = set()
        self.ending = Event()
        self.failures: list[Exception] = []
        self._threads: dict[str, Thread] = {}
        self._watching = Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._watching.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ending.set()
        for thread in (self._watching, *self._threads.values()):
            thread.join()
        if self.failures:
            raise ExceptionGroup("the kubelet failed", self.failures)

    def lose(self, node: str) -> None:
        """The node is cut off, and the control plane deletes its pods."""
        self.lost.add(node)

        def unreachable(pod: Json) -> None:
            pod["metadata"]["deletionTimestamp"] = "2026-11-29T12:00:00Z"
            pod["status"]["conditions"].append(
                {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "deleted"}
            )

        for pod in self.api.placed():
            if pod["spec"]["nodeName"] == node:
                self.api.change(pod["metadata"]["uid"], unreachable)

    def _watch(self) -> None:
        while not self.ending.wait(_TICK_SECONDS):
            for pod in self.api.placed():
                uid = pod["metadata"]["uid"]
                if uid not in self._threads:
                    self._threads[uid] = Thread(target=self._run, args=(pod,))
                    self._threads[uid].start()

    def _run(self, pod: Json) -> None:
        try:
            with ExitStack() as stack:
                _Pod(self, pod, stack).live()
        except Exception as error:
            self.failures.append(error)


class _Pod:
    def __init__(self, kubelet: Kubelet, pod: Json, stack: ExitStack) -> None:
        self.kubelet = kubelet
        self.api = kubelet.api
        self.pod = pod
        self.stack = stack
        self.uid: str = pod["metadata"]["uid"]
        self.node: str = pod["spec"]["nodeName"]
        self.folder = kubelet.folder / pod["metadata"]["name"]
        self.root = self.folder / "root"  # of BDN's containers
        self.signalled_at = 0.0
        self.running: dict[str, Program | subprocess.Popen[bytes]] = {}

    def live(self) -> None:
        while self.node in self.kubelet.held and self._goes_on():
            time.sleep(_TICK_SECONDS)
        token = self.kubelet.issuer.token(NAMESPACE, pod=self.uid)
        volumes = self._volumes(token) if self._goes_on() else {}
        if volumes and self._ended(self._start("prepare", volumes, token)) == 0 and self._goes_on():
            self._start("main", volumes, token)
            self._start("bdn", volumes, token)
            for name in ("main", "bdn"):
                self._ended(name)
        self._report(self._finish)
        if self.node not in self.kubelet.lost:
            while not self.kubelet.ending.is_set() and not self._is_deleted() and self._exists():
                time.sleep(_TICK_SECONDS)
            if self._is_deleted():
                self.api.remove(self.uid)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- volumes ---

    def _volumes(self, token: str) -> dict[str, Path]:
        """Each volume's folder. Those of BDN's containers are where these see them, below ``root``."""
        spec = self.pod["spec"]
        of_bdn = {
            mount["name"]: mount["mountPath"]
            for container in (*spec["initContainers"], spec["containers"][1])
            for mount in container["volumeMounts"]
            if "subPath" not in mount
        }
        volumes: dict[str, Path] = {}
        for volume in spec["volumes"]:
            name = volume["name"]
            place = self.root / of_bdn[name].lstrip("/") if name in of_bdn else self.folder / "volumes" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if "csi" in volume:
                given = volume["csi"]["volumeAttributes"]
                staged = self.kubelet.stage(self.folder.name, given["mirror"], given["mountLocation"], token)
                place.symlink_to(staged)
            else:
                place.mkdir(parents=True, exist_ok=True)
                place.chmod(0o777)
            volumes[name] = place
        (volumes["token"] / "token").write_text(token)
        (volumes["podinfo"] / "want").write_text("stage")
        (self.root / "dev").mkdir()
        return volumes

    # --- containers ---

    def _start(self, name: str, volumes: dict[str, Path], token: str) -> str:
        spec = self.pod["spec"]
        (container,) = [one for one in (*spec["initContainers"], *spec["containers"]) if one["name"] == name]
        log = self.stack.enter_context((self.folder / f"{name}.log").open("ab"))
        if name == "main":
            self.running[name] = self._start_main(container, volumes, log.fileno())
        else:
            self.running[name] = self._start_bdn(container, log.fileno())
        self._report(lambda pod: set_state(pod, name, {"running": {"startedAt": "2026-11-29T12:00:00Z"}}))
        return name

    def _start_bdn(self, container: Json, log: int) -> Program:
        fields = {"spec.nodeName": self.node, "metadata.uid": self.uid}
        environment = {
            one["name"]: one.get("value") or fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container["env"]
        }
        environment["BDN_AGENT_TOKEN_FILE"] = f"{self.root}{environment['BDN_AGENT_TOKEN_FILE']}"
        environment["JOB_COMPLETION_INDEX"] = self.pod["metadata"]["annotations"][
            "batch.kubernetes.io/job-completion-index"
        ]
        environment |= {"PATH": os.environ["PATH"], "HOME": str(self.folder), "PYTHONPATH": str(ROOT)}
        environment |= {"BDN_EGRESS_ALLOW": ALLOW_LOOPBACK}
        program, command = container["command"]
        assert program == "bdn-rank"
        (self.root / "dev/termination-log").touch()
        arguments = (sys.executable, "-m", "node_agent.run", command, "--root", str(self.root))
        return fork(arguments, environment, out=log, err=log, folder=self.folder)

    def _start_main(self, container: Json, volumes: dict[str, Path], log: int) -> "subprocess.Popen[bytes]":
        script, *working_dir = container["command"]
        assert script == f"{RUN_PLACE}/start.sh"
        home = self.folder / "home"
        home.mkdir()
        binds = []
        for mount in container["volumeMounts"]:
            source = volumes[mount["name"]] / mount.get("subPath", "")
            source.mkdir(parents=True, exist_ok=True)
            binds.append(Bind(source.resolve(), mount["mountPath"], is_writable=not mount.get("readOnly")))
        sandbox = Container(
            "main", tuple(binds), home, working_dir=next(iter(working_dir), None), is_root=os.geteuid() == 0
        )
        command = ["sh", "-c", 'exec 3>"$0"; exec "$@"', str(self.folder / "main.info"), *bwrap(sandbox)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _ended(self, name: str) -> int:
        """The exit code of a container, once it has ended; -1 if the test ends before."""
        process = self.running[name]
        while (code := process.poll()) is None:
            if self.kubelet.ending.is_set():
                self._signal(signal.SIGKILL)
            if self._is_deleted():
                self._terminate()
            if (self.root / "podinfo").is_dir():
                self._show_annotation()
            time.sleep(_TICK_SECONDS)
        if self.kubelet.ending.is_set():
            return -1
        code = 128 - code if code < 0 else code
        message = (self.root / "dev/termination-log").read_text() if name != "main" else ""
        reason = "Error" if code else "Completed"
        state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
        self._report(lambda pod: set_state(pod, name, state))
        return code

    def _show_annotation(self) -> None:
        want = self._current()["metadata"]["annotations"]["bdn.dev/want"] if self._exists() else "stage"
        file = self.root / "podinfo/want"
        if file.read_text() != want:
            (self.root / "podinfo/new").write_text(want)
            (self.root / "podinfo/new").rename(file)

    def _terminate(self) -> None:
        """SIGTERM to all containers, and SIGKILL when the grace period is over."""
        now = time.monotonic()
        if not self.signalled_at:
            self.signalled_at = now
            self._signal(signal.SIGTERM)
        elif now - self.signalled_at > self.pod["spec"]["terminationGracePeriodSeconds"]:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for name, process in self.running.items():
            if process.poll() is not None:
                continue
            if name == "main":  # process 1 of the container, which exists a moment after bwrap
                with suppress(OSError, ValueError, KeyError):
                    os.kill(int(json.loads((self.folder / "main.info").read_bytes())["child-pid"]), number)
            else:
                process.send_signal(number)

    # --- the pod, as the API server has it ---

    def _current(self) -> Json:
        return next(pod for pod in self.api.placed() if pod["metadata"]["uid"] == self.uid)

    def _exists(self) -> bool:
        return any(pod["metadata"]["uid"] == self.uid for pod in self.api.placed())

    def _is_deleted(self) -> bool:
        return self._exists() and "deletionTimestamp" in self._current()["metadata"]

    def _goes_on(self) -> bool:
        return not self.kubelet.ending.is_set() and not self._is_deleted() and self._exists()

    def _report(self, change: Callable[[Json], None]) -> None:
        if self.node not in self.kubelet.lost and not self.kubelet.ending.is_set():
            self.api.change(self.uid, change)

    def _finish(self, pod: Json) -> None:
        known = [*pod["status"].get("initContainerStatuses", []), *pod["status"].get("containerStatuses", [])]
        codes = [one["state"]["terminated"]["exitCode"] for one in known if "terminated" in one["state"]]
        pod["status"]["phase"] = "Succeeded" if codes == [0, 0, 0] else "Failed"
