"""What became of a rank, from what Kubernetes says of its pod. No I/O."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from bdn.core.training.states import RankState
from bdn.mirror.training.kubernetes_api import KubernetesJob, Pod, Terminated
from bdn.mirror.training.manifests import FOLLOW, MAIN, PREPARE, WANT
from bdn.wire.job_schema import SyncStatus
from bdn.wire.run_schema import RunReport
from bdn.wire.shapes import ErrorBody

_RANK: Final = "batch.kubernetes.io/job-completion-index"  # annotation of a pod; Kubernetes before 1.21 has none
_NEVER: Final = ("ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError")
_NOT_STARTED: Final = ("StartError", "ContainerCannotRun")
_OF_DISKS: Final = ("ephemeral", "emptyDir", "EmptyDir")  # in messages of the kubelet
_DISRUPTION: Final = "DisruptionTarget"
_BY_CONTROL_PLANE: Final = ("DeletionByTaintManager", "DeletionByPodGC")  # its node is unreachable, or gone
_WITH_CODE: Final = re.compile(r"(.+) \[([A-Z_]{1,64})\]", re.DOTALL)
_LONGEST: Final = 2000  # characters of a message


def rank_of(pod: Pod) -> int:
    """Of which rank a pod is; -1 for an annotation that is not a number."""
    number = pod.metadata.annotations.get(_RANK, "0")
    return int(number) if number.isascii() and number.isdigit() and len(number) < 5 else -1


def pod_for(pods: Iterable[Pod], rank: int, uid: str) -> Pod | None:
    """The pod of a rank: the one with this uid, or before a uid is known the one that is to stay."""
    own = [pod for pod in pods if rank_of(pod) == rank and uid in ("", pod.metadata.uid)]
    return min(own, key=lambda pod: (pod.metadata.is_deleted, pod.metadata.name), default=None)


def report_of(run: str, rank: int, pod: Pod | None, *, is_ending: bool) -> RunReport:
    """The state of a rank. ``is_ending``: the job's end is decided, so that its pods may be deleted."""
    if pod is None and is_ending:
        return RunReport(run=run, rank=rank, state="ENDED")
    lost = _GONE if pod is None else _lost(pod)
    if pod is None or lost is not None:
        return RunReport(run=run, rank=rank, state="LOST", error=lost)
    ended, never, error = pod.state_of(MAIN).terminated, _never(pod), _ended_by_container(pod)
    is_over = never is not None or has_ended(pod) or (error is not None and not _is_going(pod))
    return RunReport(
        run=run,
        rank=rank,
        state="ENDED" if is_over else _state_of(pod),
        exit_code=None if ended is None or _did_not_start(ended) else ended.code,
        error=never or (None if is_ending else _ended_by_kubernetes(pod)) or error,
        sync_status=_sync_status(pod),
    )


def has_ended(pod: Pod) -> bool:
    """Whether no container of the pod runs any more."""
    is_over = pod.status.phase in ("Succeeded", "Failed")
    return is_over or all(pod.state_of(name).terminated is not None for name in (MAIN, FOLLOW))


def is_settled(pod: Pod | None) -> bool:
    """Whether the pod is not deleted, so that all that happens to it is its own: Kubernetes deletes the other pods of a failed Job."""
    return pod is not None and not pod.metadata.is_deleted


def waits_for(job: KubernetesJob | None, pods: Sequence[Pod], ranks: int) -> str | None:
    """What a job waits for before all its pods are on nodes; None if they are."""
    placed = {rank_of(pod) for pod in pods if pod.spec.node_name and not pod.metadata.is_deleted}
    if placed >= set(range(ranks)):
        return None
    if job is not None and job.spec.suspend:
        said = next((one.message for one in job.status.conditions if one.type == "Suspended"), "")
        return f"waits in its queue{f': {said}' if said else ''}"[:_LONGEST]
    for pod in pods:
        for condition in pod.status.conditions:
            if condition.type == "PodScheduled" and condition.status == "False" and condition.message:
                return f"waits for nodes: {condition.message}"[:_LONGEST]
    if len(pods) < ranks:
        return f"waits for Kubernetes to make its pods: {len(pods)} of {ranks} are there"
    return "waits for Kubernetes to choose nodes for its pods"


# --- the parts of a report ---


def _state_of(pod: Pod) -> RankState:
    """Of a rank that is not over."""
    main, follow = pod.state_of(MAIN), pod.state_of(FOLLOW)
    if follow.running is None or (main.running is None and main.terminated is None):
        return "STAGING"
    return "RUNNING" if _is_going(pod) else "STAGED"


def _is_going(pod: Pod) -> bool:
    return pod.metadata.annotations.get(WANT) == "go"


def _sync_status(pod: Pod) -> SyncStatus | None:
    """Of the checkpoints, from the end of the commands on."""
    follow = pod.state_of(FOLLOW).terminated
    if pod.state_of(MAIN).terminated is None:
        return None
    return "COMPLETED" if follow is not None and not follow.code else "SYNCING"


def _lost(pod: Pod) -> ErrorBody | None:
    """Why the kubelet reports nothing of a pod any more."""
    node = f"its node {pod.spec.node_name}"
    if pod.status.phase == "Unknown" or pod.status.reason == "NodeLost":
        return _error("NODE_LOST", f"{node} does not answer: {pod.status.message or 'no reason given'}")
    disruption = pod.status.condition(_DISRUPTION)
    if pod.metadata.is_deleted and disruption is not None and disruption.reason in _BY_CONTROL_PLANE:
        return _error("NODE_LOST", f"{node} is lost: {disruption.message or disruption.reason}")
    return None


def _ended_by_kubernetes(pod: Pod) -> ErrorBody | None:
    """Why the pod of a job that shall go on ends, whatever its commands say."""
    status, disruption = pod.status, pod.status.condition(_DISRUPTION)
    if status.reason == "Evicted":
        is_disk = any(word in status.message for word in _OF_DISKS)
        return _error("SCRATCH_FULL" if is_disk else "NODE_LOST", f"Kubernetes evicted its pod: {status.message}")
    if disruption is not None:
        return _error("NODE_LOST", f"Kubernetes ends its pod: {disruption.message or disruption.reason}")
    if pod.metadata.is_deleted:
        return _error("NODE_LOST", "its pod was deleted")
    has_begun = any(pod.state_of(name).terminated is not None for name in (PREPARE, MAIN))
    if status.phase == "Failed" and not has_begun:
        return _error("NODE_LOST", f"Kubernetes ended its pod: {status.message or status.reason or 'no reason given'}")
    return None


def _ended_by_container(pod: Pod) -> ErrorBody | None:
    prepare, main, follow = (pod.state_of(name).terminated for name in (PREPARE, MAIN, FOLLOW))
    if prepare is not None and prepare.code:
        said, code = _said_by_bdn(prepare)
        return _error(code or "INTERNAL", f"it could not be prepared: {said}")
    if main is None and follow is not None:
        said, _ = _said_by_bdn(follow)
        return _error("INTERNAL", f"the container {FOLLOW} ended before the commands: {said}")
    if main is not None and _did_not_start(main):
        return _error("INVALID_REQUEST", f"its image could not be started: {main.message or main.reason}")
    if main is not None and not main.code and follow is not None and follow.code:
        said, _ = _said_by_bdn(follow)
        return _error("CHECKPOINT_SYNC_FAILED", f"its output and checkpoints were not all sent: {said}")
    return None


def _did_not_start(ended: Terminated) -> bool:
    return ended.reason in _NOT_STARTED


def _never(pod: Pod) -> ErrorBody | None:
    """Why a container of the pod will never start."""
    for name in (PREPARE, MAIN, FOLLOW):
        waiting = pod.state_of(name).waiting
        if waiting is not None and waiting.reason in _NEVER:
            return _error("INVALID_REQUEST", f"container {name} cannot start: {waiting.reason}: {waiting.message}")
    return None


def _said_by_bdn(ended: Terminated) -> tuple[str, str]:
    """Why ``bdn-rank`` failed, and the error's code; empty if it was ended before it could say that."""
    said, code = ended.message.strip(), ""
    if (found := _WITH_CODE.fullmatch(said)) is not None:
        said, code = found[1], found[2]
    return said or f"exit code {ended.code}, {ended.reason or 'no reason given'}", code


def _error(code: str, message: str) -> ErrorBody:
    return ErrorBody(code=code, message=message[:_LONGEST], retryable=False)


_GONE: Final = _error("NODE_LOST", "its pod is gone: it was deleted, or its node is lost")
