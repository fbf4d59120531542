"""A Kubernetes API server with Jobs and pods, and what scheduler and controllers do with them. What runs in a pod, a test says."""

import json
import re
import ssl
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from datetime import UTC, datetime
from threading import RLock
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import parse_qs

import kubernetes_validate  # type: ignore[import-untyped]

from tests.doubles.faults import Fault
from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.request_log import RequestLog

Json = dict[str, Any]
NAMESPACE: Final = "training"
TOKEN: Final = "the-mirrors-own-service-account"
VERSIONS: Final = ("1.30", "1.37")
_PATH: Final = re.compile(
    r"/(?:api/v1|apis/batch/v1)/namespaces/([a-z0-9-]+)/(jobs|pods|services|secrets)(?:/([a-z0-9.-]+))?"
)
_INDEX: Final = "batch.kubernetes.io/job-completion-index"
_PAGE: Final = 1  # objects of a page, whatever a client asks for: there are always several


class RefusalError(Exception):
    """An answer that is not a success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ApiServer(AbstractContextManager["ApiServer"]):
    """``nodes`` take one pod each. ``sent`` are the objects as clients sent them. ``queue_admits``: Kueue lets Jobs start.

    Objects are by collection and name. Objects that a test changes are to be changed within ``change``.
    """

    def __init__(self, tls: ssl.SSLContext, *nodes: str) -> None:
        self.nodes = list(nodes)
        self.sent: list[Json] = []
        self.queue_admits = True
        self.log = RequestLog()
        self.lock = RLock()
        self.objects: dict[str, dict[str, Json]] = {kind: {} for kind in ("jobs", "pods", "services", "secrets")}
        self._origin = Origin("kubernetes", self._respond, log=self.log, tls=tls)

    def __enter__(self) -> Self:
        self._origin.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._origin.__exit__(kind, error, trace)

    @property
    def url(self) -> str:
        return self._origin.url

    def fail(self, fault: Fault, method: str | None = None) -> None:
        self._origin.script.add(fault, method=method, times=None)

    def mend(self) -> None:
        self._origin.script.clear()

    # --- what a test, or a kubelet, sees and changes ---

    def names(self, kind: str) -> list[str]:
        with self.lock:
            return sorted(self.objects[kind])

    def job(self, run: str) -> Json | None:
        with self.lock:
            return deepcopy(self.objects["jobs"].get(f"bdn-{run}"))

    def pod(self, run: str, rank: int = 0) -> Json | None:
        """The newest pod of a rank."""
        with self.lock:
            found = [pod for pod in self._pods_of(f"bdn-{run}") if _rank_of(pod) == rank]
            return deepcopy(found[-1]) if found else None

    def placed(self) -> list[Json]:
        """All pods that are on nodes."""
        with self.lock:
            return deepcopy([pod for pod in self.objects["pods"].values() if "nodeName" in pod["spec"]])

    def change(self, uid: str, by: Callable[[Json], None]) -> None:
        """Change the pod with this uid, if it is there, and let the controllers see that."""
        with self.lock:
            for pod in self.objects["pods"].values():
                if pod["metadata"]["uid"] == uid:
                    by(pod)
            self._settle()

    def runs(self, run: str, *ranks: int) -> None:
        """The containers of these ranks run."""

        def running(pod: Json) -> None:
            pod["status"] |= {"phase": "Running"}
            set_state(pod, "prepare", {"terminated": {"exitCode": 0, "reason": "Completed"}})
            for name in ("main", "bdn"):
                set_state(pod, name, {"running": {"startedAt": _now()}})

        for rank in ranks or (0,):
            self.change(self._uid(run, rank), running)

    def ends(self, run: str, rank: int = 0, code: int = 0, sent: int | None = 0) -> None:
        """A rank's commands end with this code, and then its other container; ``sent`` None: that still runs."""

        def end(pod: Json) -> None:
            set_state(pod, "main", {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}})
            if sent is not None:
                set_state(pod, "bdn", {"terminated": {"exitCode": sent, "reason": "Error" if sent else "Completed"}})
                pod["status"]["phase"] = "Failed" if code or sent else "Succeeded"

        self.change(self._uid(run, rank), end)

    def remove(self, uid: str) -> None:
        """A pod is gone, as the kubelet does once its containers have ended."""
        with self.lock:
            pods = self.objects["pods"]
            for name in [name for name, pod in pods.items() if pod["metadata"]["uid"] == uid]:
                del pods[name]
            self._settle()

    def _uid(self, run: str, rank: int) -> str:
        pod = self.pod(run, rank)
        assert pod is not None, f"rank {rank} of {run} has no pod"
        return str(pod["metadata"]["uid"])

    # --- the API ---

    def _respond(self, request: Request) -> Answer:
        headers = {name.lower(): value for name, value in request.headers.items()}
        try:
            with self.lock:
                status, document = self._done(request, headers)
        except RefusalError as refusal:
            status = refusal.status
            document = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "message": str(refusal),
                "code": status,
            }
        return Answer(status, {"Content-Type": "application/json"}, json.dumps(document).encode())

    def _done(self, request: Request, headers: dict[str, str]) -> tuple[int, Json]:
        if headers.get("authorization") != f"Bearer {TOKEN}":
            raise RefusalError(401, "Unauthorized")
        found = _PATH.fullmatch(request.url.path)
        if found is None or found[1] != NAMESPACE:
            raise RefusalError(403, f"cannot {request.method} {request.url.path}")
        kind, name = found[2], found[3]
        objects = self.objects[kind]
        if request.method == "POST" and name is None:
            return 201, self._create(kind, json.loads(request.body))
        if request.method == "GET" and name is None:
            return 200, _page(objects, parse_qs(request.url.query))
        if name is None or name not in objects:
            raise RefusalError(404, f'{kind} "{name}" not found')
        if request.method == "PATCH" and kind == "pods":
            assert headers["content-type"] == "application/merge-patch+json"
            change = json.loads(request.body)["metadata"]
            if change["uid"] != objects[name]["metadata"]["uid"]:
                raise RefusalError(409, "the UID in the precondition does not match")
            objects[name]["metadata"]["annotations"] |= change["annotations"]
        elif request.method == "DELETE" and kind == "jobs":
            assert parse_qs(request.url.query) == {"propagationPolicy": ["Foreground"]}
            objects[name]["metadata"]["deletionTimestamp"] = _now()
        elif request.method != "GET":
            raise RefusalError(403, f"cannot {request.method} {kind}")
        answer = deepcopy(objects[name])
        self._settle()
        return 200, answer

    def _create(self, kind: str, manifest: Json) -> Json:
        self.sent.append(deepcopy(manifest))
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise RefusalError(422, f"{error.message} at {list(error.path)}") from None
        made = _made(manifest)
        name = made["metadata"]["name"]
        if name in self.objects[kind]:
            raise RefusalError(409, f'{kind} "{name}" already exists')
        for owner in made["metadata"].get("ownerReferences", ()):
            assert self.objects["jobs"][owner["name"]]["metadata"]["uid"] == owner["uid"]
        if kind == "jobs":
            made["status"] = {}
            made["spec"].setdefault("suspend", "kueue.x-k8s.io/queue-name" in made["metadata"]["labels"])
        self.objects[kind][name] = made
        self._settle()
        return deepcopy(made)

    # --- scheduler and controllers ---

    def _settle(self) -> None:
        """Until nothing changes: pods are made, placed and deleted, Jobs end, and what a deleted Job owned is gone."""
        before = ""
        while (now := json.dumps(self.objects)) != before:
            before = now
            for job in list(self.objects["jobs"].values()):
                self._settle_job(job)
            for pod in list(self.objects["pods"].values()):
                self._place(pod)

    def _settle_job(self, job: Json) -> None:
        name, conditions = job["metadata"]["name"], job["status"].setdefault("conditions", [])
        if self.queue_admits:
            job["spec"]["suspend"] = False
        pods = self._pods_of(name)
        is_deleted = "deletionTimestamp" in job["metadata"]
        if not pods and not conditions and not is_deleted and not job["spec"]["suspend"]:
            for rank in range(job["spec"]["completions"]):
                self._make_pod(job, rank)
            return
        phases = [pod["status"]["phase"] for pod in pods]
        if "Failed" in phases and not conditions:
            conditions.append({"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"})
        elif phases == ["Succeeded"] * job["spec"]["completions"] and not conditions:
            conditions.append({"type": "Complete", "status": "True"})
        for pod in pods:
            is_over = pod["status"]["phase"] in ("Failed", "Succeeded")
            if is_deleted or (not is_over and any(one["type"] == "Failed" for one in conditions)):
                self._delete_pod(pod)
        if is_deleted and not self._pods_of(name):
            for objects in self.objects.values():
                for each in [key for key, one in objects.items() if _is_owned(one, job) or one is job]:
                    del objects[each]

    def _make_pod(self, job: Json, rank: int) -> None:
        name = f"{job['metadata']['name']}-{rank}-{uuid.uuid4().hex[:5]}"
        template = deepcopy(job["spec"]["template"])
        pod = _made({"apiVersion": "v1", "kind": "Pod", **template})
        pod["metadata"] |= {"name": name, "namespace": NAMESPACE}
        pod["metadata"].setdefault("annotations", {})[_INDEX] = str(rank)
        pod["metadata"]["ownerReferences"] = [{"name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}]
        pod["status"] = {"phase": "Pending", "conditions": []}
        self.objects["pods"][name] = pod

    def _place(self, pod: Json) -> None:
        if "nodeName" in pod["spec"]:
            return
        used = {
            one["spec"].get("nodeName")
            for one in self.objects["pods"].values()
            if one["status"]["phase"] not in ("Succeeded", "Failed")
        }
        free = [node for node in self.nodes if node not in used]
        condition = {"type": "PodScheduled", "status": "True" if free else "False"}
        if free:
            pod["spec"]["nodeName"] = free[0]
        else:
            condition |= {"reason": "Unschedulable", "message": f"0/{len(self.nodes)} nodes are available"}
        pod["status"]["conditions"] = [condition]

    def _delete_pod(self, pod: Json) -> None:
        """A pod that no kubelet has seen, or whose containers have ended, is gone at once."""
        is_over = pod["status"]["phase"] in ("Failed", "Succeeded")
        if "nodeName" not in pod["spec"] or is_over:
            del self.objects["pods"][pod["metadata"]["name"]]
        else:
            pod["metadata"].setdefault("deletionTimestamp", _now())

    def _pods_of(self, job: str) -> list[Json]:
        return [pod for pod in self.objects["pods"].values() if pod["metadata"]["ownerReferences"][0]["name"] == job]


def set_state(pod: Json, container: str, state: Json) -> None:
    key = "initContainerStatuses" if container == "prepare" else "containerStatuses"
    others = [one for one in pod["status"].get(key, []) if one["name"] != container]
    pod["status"][key] = [*others, {"name": container, "state": state}]


def state_of(pod: Json, container: str) -> Json:
    known = [*pod["status"].get("initContainerStatuses", []), *pod["status"].get("containerStatuses", [])]
    return next((dict(one["state"]) for one in known if one["name"] == container), {})


def _made(manifest: Json) -> Json:
    made = deepcopy(manifest)
    made["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": _now()}
    return made


def _is_owned(one: Json, job: Json) -> bool:
    return job["metadata"]["uid"] in [owner["uid"] for owner in one["metadata"].get("ownerReferences", ())]


def _rank_of(pod: Json) -> int:
    return int(pod["metadata"]["annotations"][_INDEX])


def _page(objects: dict[str, Json], query: dict[str, list[str]]) -> Json:
    (selector,) = query["labelSelector"]
    found = [one for one in objects.values() if _matches(one["metadata"]["labels"], selector)]
    start = int(query.get("continue", ["0"])[0])
    following = {"continue": str(start + _PAGE)} if start + _PAGE < len(found) else {}
    return {"kind": "List", "metadata": following, "items": deepcopy(found[start : start + _PAGE])}


def _matches(labels: dict[str, str], selector: str) -> bool:
    one_of = re.fullmatch(r"(\S+) in \((.+)\)", selector)
    if one_of is not None:
        return labels.get(one_of[1]) in one_of[2].split(",")
    name, value = selector.split("=")
    return labels.get(name) == value


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
