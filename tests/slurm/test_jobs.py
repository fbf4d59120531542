"""deploy/slurm on a real slurmctld with two slurmd: jobs of users who write ``--comment=bdn:…``."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.faults import hang
from tests.doubles.hub import Hub
from tests.support.agent.mounts import needs_mounts
from tests.support.content.noise import MIB, noise
from tests.support.services.slurm import NODES, needs_slurm
from tests.support.services.slurm_site import Site, slurm_site

pytestmark = [needs_slurm(), needs_mounts]
USER, OTHER = "nobody", "daemon"
WEIGHTS = noise(9 * MIB + 1, 41)
MODEL = "--comment=bdn:hf://org/model@main"
WAIT = "until [ -e go-$SLURM_JOB_ID ]; do sleep 0.1; done"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub() as double:
        double.repo("org/model").commit({"config.json": b"{}", "model.safetensors": WEIGHTS})
        double.repo("org/data").commit({"rows.txt": b"42\n"})
        yield double


@pytest.fixture(scope="module")
def running(hub: Hub) -> Iterator[Site]:
    with slurm_site({"HF_ENDPOINT": hub.url}) as site:
        yield site


@pytest.fixture
def site(running: Site) -> Iterator[Site]:
    """After a test all nodes are idle, none is drained, and nothing is staged, whatever the jobs did."""
    yield running
    running.slurm.await_nodes("idle", "idle")
    assert {node: (running.staged(node), running.left(node)) for node in NODES} == dict.fromkeys(NODES, ([], []))


def test_job__of_two_nodes__sees_verified_read_only_files_at_its_first_command(site: Site) -> None:
    script = """set -e
cd "$BDN_WEIGHTS"; sha256sum model.safetensors; findmnt -n -o OPTIONS --target . | cut -d, -f1
srun sh -c 'cat "$BDN_WEIGHTS/config.json"; echo " on $SLURMD_NODENAME"' | sort"""
    job = site.slurm.submit(USER, script, "-N2", MODEL)
    assert site.slurm.await_job(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", site.slurm.output(USER, job)
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    expected = [f"{digest}  model.safetensors", "ro", "{} on n1", "{} on n2"]
    assert site.slurm.output(USER, job).splitlines() == expected


def test_job__with_named_sources__has_a_variable_for_each_and_keeps_them_when_its_comment_changes(site: Site) -> None:
    comment = "--comment=bdn:MODEL=hf://org/model DATA=hf://datasets/org/data"
    site_data = 'cat $DATA/rows.txt; ls $MODEL; echo "[$BDN_WEIGHTS]"'
    job = site.slurm.submit(USER, f"{WAIT}; {site_data}", "-w", "n1", comment.replace("datasets/", ""))
    site.slurm.await_job(job, "RUNNING")
    site.slurm.wait(lambda: site.staged("n1") == [f"slurm-{job}"], "stage on n1")
    assert site.slurm.user(USER, "scontrol", "update", f"JobId={job}", "Comment=mine").code == 0
    site.slurm.user(USER, "touch", f"go-{job}")
    site.slurm.await_job(job, "COMPLETED")
    assert site.slurm.output(USER, job).split() == ["42", "config.json", "model.safetensors", "[]"]


def test_job__without_such_a_comment__gets_nothing_and_waits_for_nothing(site: Site) -> None:
    jobs = [site.slurm.submit(USER, 'echo "[$BDN_WEIGHTS]"', *options) for options in ((), ("--comment=for bdn:x",))]
    for job in jobs:
        site.slurm.await_job(job, "COMPLETED")
        assert site.slurm.output(USER, job) == "[]\n"


def test_job__with_a_wrong_comment_or_source__fails_with_a_sentence_and_drains_no_node(site: Site) -> None:
    """None of them runs anything, and none of their commands starts."""
    mark = site.root / "mark"
    cases = {
        "bdn:": "bdn: the comment names 0 sources",
        f"bdn:$(touch {mark})": "bdn: ",
        f"bdn:hf://org/model;touch {mark}": "bdn: ",
        "bdn:MODEL=../../etc": "bdn: ",
        "bdn:../../etc=hf://org/model": "bdn: '../../etc' cannot name an environment variable",
        "bdn:PATH=hf://org/model": "bdn: 'PATH' cannot name an environment variable",
        "bdn:A=hf://org/model\nexport LD_PRELOAD=x": "bdn: the comment is longer than 4096 characters or has",
        "bdn:hf://org/model@absent": "[REVISION_NOT_FOUND]",
    }
    jobs = {site.slurm.submit(USER, "echo started", f"--comment={comment}"): said for comment, said in cases.items()}
    for job, said in jobs.items():
        shown = site.slurm.await_job(job, "FAILED", "COMPLETED")
        output = site.slurm.output(USER, job)
        assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "1:0"), output
        assert said in output
        assert "started" not in output
    assert not mark.exists()
    assert set(site.slurm.node_states().values()) <= {"idle", "allocated", "completing"}


def test_files_of_a_job__are_not_named_to_another_user(site: Site) -> None:
    job = site.slurm.submit(USER, WAIT, "-w", "n1", MODEL)
    left = site.jobs("n1") / job / "environment"
    site.slurm.wait(left.exists, "environment of the job")
    name, _, path = left.read_text().strip().partition("=")
    assert (name, Path(path).name) == ("BDN_WEIGHTS", "BDN_WEIGHTS")
    forged = {"SLURM_JOB_ID": job, "SLURMD_NODENAME": "n1"}
    for user, lines in ((USER, f"export BDN_WEIGHTS={path}\n"), (OTHER, "")):
        assert site.slurm.user(user, str(site.root / "task_prolog"), **forged).out == lines
    for number in ("../n1/1", f"{job}/../{job}", "1 2"):
        assert site.slurm.user(USER, str(site.root / "task_prolog"), **{**forged, "SLURM_JOB_ID": number}).out == ""
    site.slurm.user(USER, "touch", f"go-{job}")
    site.slurm.await_job(job, "COMPLETED")


@pytest.fixture
def slow(site: Site) -> Iterator[Site]:
    """The agent of n1 takes minutes for 9 MiB."""
    site.crash_agent("n1")
    site.start_agent("n1", BDN_AGENT_DOWNLOAD_RATE="100kB")
    yield site
    site.crash_agent("n1")
    site.start_agent("n1")


def test_job__canceled_while_its_files_are_pulled__frees_the_node(slow: Site, hub: Hub) -> None:
    hub.repo("org/canceled").commit({"model.safetensors": noise(9 * MIB + 1, 42)})
    job = slow.slurm.submit(USER, "echo started", "-w", "n1", "--comment=bdn:hf://org/canceled")
    slow.slurm.wait(lambda: slow.staged("n1") == [f"slurm-{job}"], "stage that is filled")
    slow.slurm.user(USER, "scancel", job)
    slow.slurm.await_nodes("idle", "idle")
    assert slow.slurm.job(job)["JobState"] == "CANCELLED"
    assert (slow.staged("n1"), slow.left("n1")) == ([], [])


def test_prolog__killed_while_it_waits__drains_its_node_and_leaves_nothing_after_the_epilog(
    slow: Site, hub: Hub
) -> None:
    hub.repo("org/killed").commit({"model.safetensors": noise(9 * MIB + 1, 43)})
    job = slow.slurm.submit(USER, "echo started", "-w", "n1", "--comment=bdn:hf://org/killed")
    slow.slurm.wait(lambda: slow.staged("n1") == [f"slurm-{job}"], "stage that is filled")
    slow.slurm.root_command("pkill", "-KILL", "-f", f"bdn.slurm prolog --jobs {slow.jobs('n1')}")
    slow.slurm.await_nodes("drained", "idle")
    shown = slow.slurm.job(job)
    assert (shown["JobState"], shown["Reason"]) == ("PENDING", "launch_failed_requeued_held")
    assert (slow.staged("n1"), slow.left("n1")) == ([], [])
    slow.slurm.user(USER, "scancel", job)
    slow.slurm.root_command("scontrol", "update", "NodeName=n1", "State=RESUME")


def test_job__whose_files_take_too_long__fails_with_a_sentence(site: Site, hub: Hub) -> None:
    hub.script.add(hang(), "/org/silent", times=None)
    site.wait_seconds(4)
    try:
        job = site.slurm.submit(USER, "echo started", "--comment=bdn:hf://org/silent")
        site.slurm.await_job(job, "FAILED")
    finally:
        site.wait_seconds(600)
    assert "bdn: the files were not staged within 4s" in site.slurm.output(USER, job)


def test_job__of_a_node_that_crashes__is_staged_elsewhere_and_the_next_job_there_releases_its_files(site: Site) -> None:
    job = site.slurm.submit(USER, f'{WAIT}; cat "$BDN_WEIGHTS/config.json"; echo " on $SLURMD_NODENAME"', MODEL)
    site.slurm.wait(lambda: any(map(site.staged, NODES)), "stage")
    (node,) = (name for name in NODES if site.staged(name))
    (other,) = (name for name in NODES if name != node)
    site.slurm.await_job(job, "RUNNING")

    site.slurm.crash_node(node, job)
    site.forget_jobs(node)  # a file system in memory
    site.slurm.await_job(job, "PENDING")
    site.slurm.root_command("scontrol", "update", f"JobId={job}", "StartTime=now")
    site.slurm.wait(lambda: site.staged(other) == [f"slurm-{job}"], "stage on the other node")
    site.slurm.user(USER, "touch", f"go-{job}")
    site.slurm.await_job(job, "COMPLETED")
    assert site.slurm.output(USER, job) == f"{{}} on {other}\n"

    assert site.staged(node) == [f"slurm-{job}"]  # nothing has told the agent yet
    site.slurm.start_node(node)
    site.slurm.root_command("scontrol", "update", f"NodeName={node}", "State=RESUME")
    later = site.slurm.submit(USER, WAIT, "-w", node, MODEL)
    site.slurm.wait(lambda: site.staged(node) == [f"slurm-{later}"], "stage of the later job alone")
    site.slurm.user(USER, "touch", f"go-{later}")
    site.slurm.await_job(later, "COMPLETED")


def test_node__whose_agent_does_not_answer__is_drained_and_the_job_is_requeued(site: Site) -> None:
    site.wait_seconds(4)
    try:
        site.crash_agent("n1")
        job = site.slurm.submit(USER, 'ls "$BDN_WEIGHTS"', "-w", "n1", MODEL)
        site.slurm.await_nodes("drained", "idle")
    finally:
        site.wait_seconds(600)
    shown = site.slurm.job(job)
    assert (shown["JobState"], shown["Reason"]) == ("PENDING", "launch_failed_requeued_held")
    site.start_agent("n1")
    site.slurm.root_command("scontrol", "update", "NodeName=n1", "State=RESUME")
    site.slurm.root_command("scontrol", "release", job)
    site.slurm.root_command("scontrol", "update", f"JobId={job}", "StartTime=now")
    site.slurm.await_job(job, "COMPLETED")
    assert site.slurm.output(USER, job).split() == ["config.json", "model.safetensors"]
