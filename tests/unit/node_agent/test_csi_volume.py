"""What the CSI driver reads from a call of the kubelet, and what it answers: pure rules."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from grpc import StatusCode
from hypothesis import given
from hypothesis import strategies as st

from bdn.core import errors
from bdn.core.errors import BdnError, InvalidRequestError, MountFailedError
from bdn.wire.mirror_schema import Mirror, MirrorSource
from bdn.wire.shapes import ErrorBody, ReportedError
from node_agent.csi.refusal import CODES, LONGEST_PROGRESS, Refusal, mirroring, still_waiting
from node_agent.csi.target import Target, opened_view, uid_of
from node_agent.csi.volume import PodVolume
from tests.support.agent.kubelet import Kubelet, Pod

KUBELET = Path("/var/lib/kubelet")
POD = Pod(Kubelet(KUBELET), uid="6f1f0e4e-3f6a-4a3b-9a1e-0d2f3c4b5a69")
PAGE = Path(__file__).parents[3] / "docs/kubernetes.md"


def volume(**attributes: str) -> PodVolume:
    target = Target.parse(str(POD.target), KUBELET)
    return PodVolume.parse(POD.request({"source": "hf://org/model", **attributes}), target, needs_token=False)


@pytest.mark.parametrize(
    ("text", "patterns"),
    [
        ("*.safetensors", ["*.safetensors"]),
        ('["*.safetensors", "*.json"]', ["*.safetensors", "*.json"]),
        ("[ab]*", ["[ab]*"]),
        ("[1]", ["[1]"]),
        (' ["a b"]', ["a b"]),
    ],
)
def test_patterns__are_a_json_list_or_one_pattern(text: str, patterns: list[str]) -> None:
    request = volume(allowPatterns=text).request
    assert request is not None
    assert request.weights is not None
    assert request.weights[0].allow_patterns == patterns


@pytest.mark.parametrize("text", ["", "[]", '["a", 1]', '[""]', '["a"', '["a", ["b"]]', '["a",' + "[" * 100_000])
def test_patterns__of_another_form__are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"ignorePatterns .*JSON list"):
        volume(ignorePatterns=text)


@pytest.mark.parametrize(
    "path",
    [
        "/etc",
        "/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/../../../../../etc/mount",
        "/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/../mount",
        "/var/lib/kubelet/pods/../volumes/kubernetes.io~csi/w/mount",
        "/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/w/mount/",
        "/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi//w/mount",
        "/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/w/mount",
        "/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/w\0/mount",
        "/var/lib/other/pods/u/volumes/kubernetes.io~csi/w/mount",
        "var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/w/mount",
        "",
    ],
)
def test_target__that_is_not_the_kubelets_form__is_refused(path: str) -> None:
    with pytest.raises(InvalidRequestError, match="BDN_CSI_KUBELET_DIR"):
        Target.parse(path, KUBELET)


names = st.from_regex(r"[a-z0-9][-a-z0-9.]{0,252}", fullmatch=True)


@given(names, names, names, names)
def test_job__of_the_longest_names__fits_and_is_found_by_its_target_alone(
    namespace: str, pod: str, one: str, other: str
) -> None:
    targets = [Target(KUBELET, POD.uid, volume) for volume in (one, other)]
    job = targets[0].job_id(namespace, pod)

    assert len(job) <= 256
    assert uid_of(job) == POD.uid
    assert [target.has(job) for target in targets] == [True, one == other]
    assert not Target(KUBELET, f"{POD.uid}0", one).has(job)


@pytest.mark.parametrize(
    "job", ["default/pod/weights", "train-42", "a/b@c", f"a/b/c@{POD.uid}", f"a/b/c@{POD.uid}.{'0' * 15}"]
)
def test_job__of_others__is_no_volumes(job: str) -> None:
    assert uid_of(job) is None


@pytest.mark.parametrize(
    "path", ["/etc", "{mounts}", "{mounts}/stg_2/volume", "{mounts}/stg_1/../../kubelet", "{mounts}/stg_1/link"]
)
def test_view__that_the_agent_names_elsewhere_or_by_a_link__is_not_opened(path: str, tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    for stage in ("stg_1", "stg_2"):
        (mounts / stage / "volume").mkdir(parents=True)
    (mounts / "stg_1/link").symlink_to("/etc")

    with pytest.raises(MountFailedError), opened_view(mounts, "stg_1", path.format(mounts=mounts)):
        pytest.fail("it was opened")
    with opened_view(mounts, "stg_1", f"{mounts}/stg_1/volume") as view:
        assert view.samefile(mounts / "stg_1/volume")


def test_view__below_mounts_that_became_a_link__is_not_opened(tmp_path: Path) -> None:
    """The agent owns the folder of its cache, and could make its mounts lead to the kubelet's pods."""
    (tmp_path / "kubelet/stg_1/volume").mkdir(parents=True)
    (tmp_path / "mounts").symlink_to("kubelet")
    path = tmp_path / "mounts/stg_1/volume"

    with pytest.raises(MountFailedError, match="symbolic link"), opened_view(tmp_path / "mounts", "stg_1", str(path)):
        pytest.fail("it was opened")


def test_view__stays_the_directory_that_was_opened__whatever_its_path_becomes(tmp_path: Path) -> None:
    right = tmp_path / "stg_1/volume"
    right.mkdir(parents=True)
    (right / "config.json").write_bytes(b"right")
    with opened_view(tmp_path, "stg_1", str(right)) as view:
        right.rename(tmp_path / "aside")
        right.symlink_to("/etc")
        assert (view / "config.json").read_bytes() == b"right"


def codes() -> set[str]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BdnError)]
    return {kind.code for kind in kinds if "code" in vars(kind)}


def test_each_error_code__has_one_code_of_grpc__and_the_page_has_the_table() -> None:
    mapped = [code for some in CODES.values() for code in some.split()]
    table = PAGE.read_text().split("| gRPC | our codes | the kubelet then |\n")[1].split("\n\n")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines()[1:]]
    documented = {row[0].strip(" `"): set(re.findall(r"`([A-Z_]+)`", row[1])) for row in rows}
    documented.pop("ABORTED")  # no error: still at work

    assert sorted(mapped) == sorted(codes())
    assert documented == {status.name: set(some.split()) for status, some in CODES.items()}


@pytest.mark.parametrize(("retryable", "status"), [(True, StatusCode.UNAVAILABLE), (False, StatusCode.INTERNAL)])
def test_code__of_a_newer_service__is_judged_by_retryable(retryable: bool, status: StatusCode) -> None:
    error = ReportedError(ErrorBody(code="NEW_CODE", message="a\nb", retryable=retryable))
    assert Refusal.of(error) == Refusal(status, "NEW_CODE: a\\nb")


@given(
    st.text(max_size=5000), st.one_of(st.none(), st.integers(0, 2**63 - 1)), st.one_of(st.none(), st.floats(0, 1e300))
)
def test_progress__of_any_source_and_size__is_one_printable_line_of_200_characters(
    source: str, total: int | None, rate: float | None
) -> None:
    mirror = Mirror(
        id="mir_0",
        status="SYNCING",
        created_at=datetime.now(UTC),
        bytes_total=total,
        bytes_transferred=(total or 0) // 3,
        bytes_per_second=rate,
        eta_seconds=rate,
        sources=[MirrorSource(source=source, mount_location="/volume", status="SYNCING")],
    )
    text = still_waiting(source, mirroring(mirror))

    assert len(text) <= LONGEST_PROGRESS
    assert text.isprintable()


def test_progress__has_figures() -> None:
    mirror = Mirror(
        id="mir_0",
        status="SYNCING",
        created_at=datetime.now(UTC),
        bytes_total=140 * 10**9,
        bytes_transferred=37 * 10**9,
        bytes_per_second=2.1e9,
        eta_seconds=48,
        sources=[],
    )
    assert (
        still_waiting("hf://org/model@main", mirroring(mirror))
        == "hf://org/model@main: 37 of 140 GB copied to the mirror, 2.1 GB/s, about 48s more"
    )
