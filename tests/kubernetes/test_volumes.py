"""BDN on a real cluster of two nodes, installed from the minimal overlay with an image of this checkout: journeys of users and operators.

``BDN_KUBERNETES_BIN`` is a folder with kube-apiserver, kube-controller-manager, kube-scheduler, kube-proxy and kubelet of 1.20. Beside it are ``root``, a
Debian root with etcd and containerd, and ``base``, of which BDN's image is made. ``tests/kubernetes/README.md`` says how to make all three.
"""

import hashlib
from collections.abc import Mapping

import pytest

from tests.doubles.content import Content, sha256_of
from tests.kubernetes.journeys import CROWDS, JOURNEYS, MODEL, READERS, SLOW
from tests.kubernetes.report import Report, run_cluster, why_no_cluster, why_no_training

WHY_NOT, WHY_NO_TRAINING = why_no_cluster(), why_no_training()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture(scope="module")
def report() -> Report:
    """What happened in the cluster, which ran for all tests of this module."""
    return run_cluster()


@pytest.fixture(autouse=True)
def check(report: Report) -> None:
    errors = {name: report[name]["error"] for name in (one.__name__ for one in JOURNEYS) if "error" in report[name]}
    assert not errors, "\n".join([*errors.values(), report["logs"][-20_000:]])


def sums_of(files: Mapping[str, Content]) -> list[str]:
    """As ``sha256sum`` prints them."""
    return [f"{sha256_of(content)}  {name}" for name, content in files.items()]


@pytest.mark.parametrize(
    ("journey", "name"),
    [
        *(("shared", name) for name in ("inline", "second", "other")),
        ("claim", None),
        ("slow", None),
        ("foreign", "own"),
        ("rebooted", "back"),
        ("rebooted", "new"),
        ("rolled", "node1"),
        ("rolled", "node2"),
    ],
)
def test_pod__reads_the_right_bytes__also_in_its_init_container__and_cannot_write(
    report: Report, journey: str, name: str | None
) -> None:
    seen = report[journey]["after"] if journey == "rolled" else report[journey]
    seen = seen[name] if name else seen
    sums = sums_of(SLOW if journey == "slow" else MODEL)
    assert seen["init"] == sums
    assert seen["main"] == [*sums, "write=1"]


def test_second_node__reads_from_the_first__and_the_mirror_serves_the_model_once(report: Report) -> None:
    assert 1 <= report["shared"]["served"] <= 1.05


def test_refusals__are_events_of_the_pod_with_code_and_remedy(report: Report) -> None:
    events = report["refused"]
    assert "code = NotFound" in events["revision"]
    assert "code = InvalidArgument" in events["publish-secret"]
    assert "bdn-admin secrets set" in events["publish-secret"]
    assert "code = NotFound" in events["no-secret"]
    assert "code = FailedPrecondition" in events["large"]
    assert "CACHE_TOO_SMALL" in events["large"]


def test_mirror_of_another_namespace__is_not_found(report: Report) -> None:
    assert "code = NotFound" in report["foreign"]["event"]
    assert "NOT_FOUND" in report["foreign"]["event"]


def test_logs__hold_no_secret_and_no_token(report: Report) -> None:
    assert "driver started" in report["logs"]
    assert "hf_x" not in report["logs"]
    assert "eyJ" not in report["logs"], "the beginning of a JSON web token"


def test_volume__that_takes_five_minutes__is_one_copy_in_few_calls_with_figures_in_events(report: Report) -> None:
    slow = report["slow"]
    figures = [event for event in slow["events"] if " of 16.8 MB copied to the mirror" in event]
    assert slow["publish_seconds"] > 280
    assert len(set(figures)) >= 2
    assert 3 <= len(slow["calls"]) <= 4
    assert slow["calls"][-1] == "volume published"
    assert slow["fetched"] == 1.0
    assert slow["after_last_byte_seconds"] < 30  # a back-off of two minutes otherwise


def test_pod__deleted_while_it_waits__leaves_nothing(report: Report) -> None:
    assert report["deleted"]["left"] == []
    assert report["deleted"]["calls"][-1] == "volume unpublished"


@pytest.mark.parametrize("count", CROWDS)
def test_pods__created_at_once__all_run_with_the_right_bytes(report: Report, count: int) -> None:
    crowd = report["crowd"][str(count)]
    assert len(crowd["publish_seconds"]) == count
    assert crowd["read"] == [f"{hashlib.sha256(b'{}').hexdigest()}  /w/config.json"]
    assert crowd["nodes"] == ["node1", "node2"] or count == 1


def test_node__that_loses_its_power__has_its_pods_back(report: Report) -> None:
    assert report["rebooted"]["restarts"] == 1
    assert report["rebooted"]["back"]["main"] == report["rebooted"]["before"]


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_containers__driver_has_no_port__and_agent_no_capability(report: Report, node: str) -> None:
    seen = report["confined"][node]
    assert seen["driver"] == []
    assert seen["agent"] == [8471]
    assert set(seen["uid"]) == {"999"}
    assert set(seen["capabilities"].values()) == {"0" * 16}
    assert seen["no_new_privileges"] == "1"


def test_rollout__of_all_agents_and_drivers__is_not_noticed_by_pods_that_read(report: Report) -> None:
    rolled = report["rolled"]
    assert rolled["replaced"] == ["node1", "node2"]
    assert set(rolled["running"]) == set(READERS)
    assert [name for name, log in rolled["logs"].items() if "read failed" in log] == []


def test_pods__that_are_deleted__leave_no_stage_mount_or_directory(report: Report) -> None:
    assert (report["emptied"]["stages"], report["emptied"]["volumes"]) == ([], [])


@pytest.mark.skipif(bool(WHY_NO_TRAINING), reason=WHY_NO_TRAINING)
def test_training_job__pushed_by_truss__runs_as_a_pod_with_its_weights_and_pushes_its_checkpoint(
    report: Report,
) -> None:
    trained = report["trained"]
    assert (trained["status"], trained["reason"]) == ("COMPLETED", "")
    said = trained["log"].replace("\n", "").replace(" ", "")
    for name, content in MODEL.items():
        assert f"FILE/app/model/{name}{sha256_of(content)}" in said
    assert "WRITTEN" not in said
    assert trained["pods"] == ["Succeeded"]
    assert [source.rpartition("/")[2] for source in trained["checkpoints"]] == ["checkpoint-1"]
