"""Ranks as reported from what Kubernetes says of their pods: one case for each thing that can become of a pod."""

from typing import Any, Final

import pytest

from bdn.mirror.training.kubernetes_api import KubernetesJob, Pod
from bdn.mirror.training.pod_reports import is_settled, pod_for, rank_of, report_of, waits_for
from bdn.wire.run_schema import RunReport

RUN: Final = "0123456789"
RUNNING: Final = {"running": {"startedAt": "2026-11-29T12:00:00Z"}}
Json = dict[str, Any]


def ended(code: int = 0, message: str = "", **fields: Any) -> Json:
    return {"terminated": {"exitCode": code, "message": message, "reason": "Error" if code else "Completed", **fields}}


def waiting(reason: str, message: str = "why") -> Json:
    return {"waiting": {"reason": reason, "message": message}}


def pod(
    main: Json | None = None,
    bdn: Json | None = None,
    prepare: Json | None = None,
    *,
    want: str = "stage",
    deleted: bool = False,
    disruption: str | None = None,
    **status: Any,
) -> Pod:
    states = {"prepare": prepare or (ended() if main else None), "main": main, "bdn": bdn}
    found = [{"name": name, "state": state} for name, state in states.items() if state is not None]
    conditions = [{"type": "PodScheduled", "status": "True"}]
    if disruption is not None:
        conditions.append({"type": "DisruptionTarget", "status": "True", "reason": disruption, "message": "so it goes"})
    metadata: Json = {"name": "p", "uid": "u", "annotations": {"bdn.dev/want": want}}
    metadata |= {"deletionTimestamp": "2026-11-29T12:00:00Z"} if deleted else {}
    return Pod.model_validate(
        {
            "metadata": metadata,
            "spec": {"nodeName": "n1", "containers": []},
            "status": {
                "phase": "Running",
                "conditions": conditions,
                "initContainerStatuses": found[:1],
                "containerStatuses": found[1:],
                **status,
            },
        }
    )


def report(one: Pod | None, *, is_ending: bool = False) -> RunReport:
    return report_of(RUN, 3, one, is_ending=is_ending)


@pytest.mark.parametrize(("one", "state"), [
    (pod(phase="Pending"), "STAGING"),
    (pod(prepare=RUNNING), "STAGING"),
    (pod(prepare=ended(), phase="Pending"), "STAGING"),
    (pod(RUNNING), "STAGING"),
    (pod(waiting("ContainerCreating"), RUNNING), "STAGING"),
    (pod(waiting("ErrImagePull"), RUNNING), "STAGING"),  # the kubelet tries again
    (pod(RUNNING, RUNNING), "STAGED"),
    (pod(RUNNING, RUNNING, want="go"), "RUNNING"),
])  # fmt: skip
def test_report__of_a_pod_that_starts_and_runs(one: Pod, state: str) -> None:
    assert report(one) == RunReport(run=RUN, rank=3, state=state)  # type: ignore[arg-type]


@pytest.mark.parametrize(("one", "state", "code", "sync"), [
    (pod(ended(), RUNNING, want="go"), "RUNNING", 0, "SYNCING"),
    (pod(ended(7), RUNNING, want="go"), "RUNNING", 7, "SYNCING"),
    (pod(ended(97), RUNNING), "STAGED", 97, "SYNCING"),
    (pod(ended(), ended(), want="go"), "ENDED", 0, "COMPLETED"),
    (pod(ended(137), ended(), want="go", phase="Failed"), "ENDED", 137, "COMPLETED"),
    (pod(ended(0, signal=9), ended(), want="go"), "ENDED", 137, "COMPLETED"),
    (pod(ended(3), ended(1), want="go"), "ENDED", 3, "SYNCING"),
])  # fmt: skip
def test_report__of_a_pod_whose_commands_have_ended(one: Pod, state: str, code: int, sync: str) -> None:
    found = report(one)
    assert (found.state, found.exit_code, found.sync_status, found.error) == (state, code, sync, None)


@pytest.mark.parametrize(("one", "code", "message"), [
    (pod(waiting("ImagePullBackOff"), RUNNING), "INVALID_REQUEST", "container main cannot start: ImagePullBackOff: why"),
    (pod(waiting("ErrImageNeverPull")), "INVALID_REQUEST", "container main cannot start: ErrImageNeverPull: why"),
    (pod(waiting("InvalidImageName")), "INVALID_REQUEST", "container main cannot start: InvalidImageName: why"),
    (pod(waiting("CreateContainerConfigError")), "INVALID_REQUEST", "container main cannot start: CreateContainerConfigError: why"),
    (pod(prepare=waiting("ImagePullBackOff")), "INVALID_REQUEST", "container prepare cannot start: ImagePullBackOff: why"),
    (pod(prepare=ended(2, "the archive is sparse [INVALID_REQUEST]"), phase="Failed"), "INVALID_REQUEST", "it could not be prepared: the archive is sparse"),
    (pod(prepare=ended(1, "Traceback"), phase="Failed"), "INTERNAL", "it could not be prepared: Traceback"),
    (pod(prepare=ended(137, reason="OOMKilled"), phase="Failed"), "INTERNAL", "it could not be prepared: exit code 137, OOMKilled"),
    (pod(ended(128, "no such file: sh", reason="StartError"), ended(), phase="Failed"), "INVALID_REQUEST", "its image could not be started: no such file: sh"),
    (pod(RUNNING, ended(137, reason="OOMKilled")), "INTERNAL", "the container bdn ended before the commands: exit code 137, OOMKilled"),
    (pod(ended(), ended(5, "no answer for an hour [STORE_UNAVAILABLE]"), phase="Failed"), "CHECKPOINT_SYNC_FAILED", "its output and checkpoints were not all sent: no answer for an hour"),
    (pod(phase="Failed", reason="Evicted", message="Pod ephemeral local storage usage exceeds"), "SCRATCH_FULL", "Kubernetes evicted its pod: Pod ephemeral local storage usage exceeds"),
    (pod(ended(137), ended(), phase="Failed", reason="Evicted", message='Usage of EmptyDir volume "checkpoints" exceeds the limit'), "SCRATCH_FULL", "Kubernetes evicted its pod: Usage of EmptyDir"),
    (pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory"), "NODE_LOST", "Kubernetes evicted its pod: The node was low on resource: memory"),
    (pod(phase="Failed", reason="UnexpectedAdmissionError", message="no GPU"), "NODE_LOST", "Kubernetes ended its pod: no GPU"),
    (pod(ended(0), ended(0), want="go", phase="Succeeded", disruption="PreemptionByScheduler"), "NODE_LOST", "Kubernetes ends its pod: so it goes"),
    (pod(ended(143), ended(0), want="go", phase="Failed", deleted=True), "NODE_LOST", "its pod was deleted"),
])  # fmt: skip
def test_report__of_a_pod_that_fails__has_a_code_and_what_kubernetes_says(one: Pod, code: str, message: str) -> None:
    found = report(one)
    assert found.state == "ENDED"
    assert found.error is not None
    assert (found.error.code, found.error.message[: len(message)]) == (code, message)


def test_report__of_a_pod_that_is_ended_from_outside__says_so_before_it_has_ended() -> None:
    """Its commands may end with 0 after SIGTERM, and the job is not complete all the same."""
    for one in (
        pod(RUNNING, RUNNING, want="go", deleted=True),
        pod(RUNNING, RUNNING, want="go", disruption="Eviction"),
    ):
        found = report(one)
        assert found.state == "RUNNING"
        assert found.error is not None
        assert found.error.code == "NODE_LOST"


@pytest.mark.parametrize("one", [
    None,
    pod(RUNNING, RUNNING, phase="Unknown"),
    pod(RUNNING, RUNNING, reason="NodeLost"),
    pod(RUNNING, RUNNING, deleted=True, disruption="DeletionByTaintManager"),
    pod(RUNNING, RUNNING, deleted=True, disruption="DeletionByPodGC"),
])  # fmt: skip
def test_report__of_a_pod_that_is_lost(one: Pod | None) -> None:
    """Also of a job that ends: it does not wait for a node that is lost."""
    assert one is None or report(one, is_ending=True).state == "LOST"
    found = report(one)
    assert found.state == "LOST"
    assert found.error is not None
    assert found.error.code == "NODE_LOST"


@pytest.mark.parametrize(("one", "state", "code"), [
    (None, "ENDED", None),
    (pod(RUNNING, RUNNING, want="go", deleted=True), "RUNNING", None),
    (pod(ended(143), RUNNING, want="go", deleted=True), "RUNNING", 143),
    (pod(ended(143), ended(), want="go", deleted=True, phase="Failed"), "ENDED", 143),
    (pod(deleted=True, phase="Failed"), "ENDED", None),
    (pod(RUNNING, RUNNING, want="go", deleted=True, disruption="EvictionByEvictionAPI"), "RUNNING", None),
])  # fmt: skip
def test_report__of_a_job_that_ends__takes_deletion_for_no_failure(
    one: Pod | None, state: str, code: int | None
) -> None:
    found = report(one, is_ending=True)
    assert (found.state, found.exit_code, found.error) == (state, code, None)


# --- which pod is a rank's, and what a job waits for ---


def placed(
    name: str, rank: str | None, *, uid: str = "u", node: str = "", deleted: bool = False, **condition: str
) -> Pod:
    annotations = {} if rank is None else {"batch.kubernetes.io/job-completion-index": rank}
    metadata: Json = {"name": name, "uid": uid, "annotations": annotations}
    metadata |= {"deletionTimestamp": "2026-11-29T12:00:00Z"} if deleted else {}
    conditions = [{"type": "PodScheduled", **condition}] if condition else []
    spec = {"nodeName": node} if node else {}
    return Pod.model_validate({"metadata": metadata, "spec": spec, "status": {"conditions": conditions}})


def test_pod_of_a_rank__is_that_of_its_uid_or_the_one_that_stays() -> None:
    gone, stays = placed("a", "1", uid="old", deleted=True), placed("b", "1", uid="new")
    pods = [gone, stays, placed("c", "0", uid="other")]
    assert pod_for(pods, 1, "") is stays
    assert pod_for(pods, 1, "old") is gone
    assert pod_for(pods, 1, "unknown") is pod_for(pods, 2, "") is None
    assert [is_settled(one) for one in (gone, stays, None)] == [False, True, False]


@pytest.mark.parametrize(
    ("annotation", "rank"), [(None, 0), ("0", 0), ("17", 17), ("x", -1), ("-1", -1), ("99999", -1), ("٣", -1)]
)
def test_rank_of_a_pod__is_its_completion_index(annotation: str | None, rank: int) -> None:
    assert rank_of(placed("a", annotation)) == rank


def job(*, suspend: bool = False, **condition: str) -> KubernetesJob:
    conditions = [condition] if condition else []
    return KubernetesJob.model_validate(
        {"metadata": {"name": "j", "uid": "u"}, "spec": {"suspend": suspend}, "status": {"conditions": conditions}}
    )


@pytest.mark.parametrize(("one", "pods", "reason"), [
    (None, [], "waits for Kubernetes to make its pods: 0 of 2 are there"),
    (job(), [placed("a", "0", node="n1")], "waits for Kubernetes to make its pods: 1 of 2 are there"),
    (job(suspend=True), [], "waits in its queue"),
    (job(suspend=True, type="Suspended", status="True", message="no quota"), [], "waits in its queue: no quota"),
    (job(), [placed("a", "0", node="n1"), placed("b", "1")], "waits for Kubernetes to choose nodes for its pods"),
    (job(), [placed("a", "0", node="n1"), placed("b", "1", status="False", message="0/9 nodes are available")], "waits for nodes: 0/9 nodes are available"),
    (job(), [placed("a", "0", node="n1"), placed("b", "1", node="n2", deleted=True)], "waits for Kubernetes to choose nodes for its pods"),
    (job(), [placed("a", "0", node="n1"), placed("b", "0", node="n2")], "waits for Kubernetes to choose nodes for its pods"),
    (job(), [placed("a", "0", node="n1"), placed("b", "1", node="n2")], None),
])  # fmt: skip
def test_job_that_waits__says_for_what(one: KubernetesJob | None, pods: list[Pod], reason: str | None) -> None:
    assert waits_for(one, pods, 2) == reason
