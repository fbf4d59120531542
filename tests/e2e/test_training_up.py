"""``bdn up`` alone: a user without network, root or container engine runs training jobs with nothing configured."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Server
from tests.support.network.alone import loopback_alone
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Shell, wait_until
from tests.support.services.ordinary import needs_ordinary_user, ordinary_user
from tests.support.services.services import answers
from tests.support.services.training import CLIENTS, User, left_over, over
from tests.support.services.training_scripts import (
    READING,
    RESUMED,
    WEIGHTS,
    check_read_only,
    publish_weights,
    resuming,
)

pytestmark = [
    pytest.mark.skipif(not CLIENTS.exists(), reason="truss is not installed; make test installs it"),
    pytest.mark.embedded("a user with nothing configured has SQLite and a directory"),
    needs_ordinary_user,
]
PORT: Final = 8460  # the default, free in a network of its own


@pytest.fixture(autouse=True)
def network() -> Iterator[None]:
    with loopback_alone():
        yield


@pytest.fixture
def shell(network: None, hub: Hub, s3: S3Server) -> Iterator[Shell]:
    publish_weights(hub, s3)
    with ordinary_user(HF_ENDPOINT=hub.url, AWS_ENDPOINT_URL_S3=s3.url) as shell:
        yield shell


@contextmanager
def up(shell: Shell, **environment: str) -> Iterator[User]:
    """``bdn up``, and a user beside it."""
    cluster = Cluster(shell.root, {}, port=PORT)
    with shell.running("bdn", "up", **environment), cluster.http() as http:
        wait_until(lambda: answers(http), what="the answer of bdn up")
        yield User(cluster, shell)


def test_a_job__finds_its_weights_read_only_and_leaves_nothing(shell: Shell) -> None:
    with up(shell) as user:
        job = user.push("demo", "python3 script.py", files={"script.py": READING}, weights=WEIGHTS)
        assert "completed successfully" in user.said
        check_read_only(user.said)
        assert "TRAINING_JOB_COMPLETED" in user.truss("view", "--job-id", job).out
        wait_until(lambda: not left_over(shell), what="an empty node")


def test_the_cache_of_a_project__is_found_by_its_next_job_and_summarized(shell: Shell) -> None:
    cached = "cache_config=CacheConfig(enabled=True)"
    with up(shell) as user:
        first = user.start(
            "cached", "mkdir $BT_PROJECT_CACHE_DIR/d; echo kept > $BT_PROJECT_CACHE_DIR/d/f", runtime=cached
        )
        assert over(user, first) == ("COMPLETED", "")
        second = user.start("cached", 'test "$(cat /root/.cache/user_artifacts/d/f)" = kept', runtime=cached)
        assert over(user, second) == ("COMPLETED", "")
        summary = user.truss("cache", "summarize", "cached", "-o", "json").document
        assert "user_artifacts/d/f" in [one["path"] for one in summary["files"]]


def test_a_job__resumes_from_the_checkpoint_of_the_job_before_it(shell: Shell) -> None:
    runtime = resuming("resumes")
    with up(shell) as user:
        for step in (1, 2):
            job = user.start("resumes", "python3 script.py", files={"script.py": RESUMED}, runtime=runtime)
            assert over(user, job) == ("COMPLETED", "")
            listed = user.truss("checkpoints", "list", "--job-id", job, "-o", "json").document
            assert [one["checkpoint_id"] for one in listed["checkpoints"]] == [f"checkpoint-{step}"]


def test_scratch__over_its_bound__stops_the_job_and_leaves_nothing(shell: Shell) -> None:
    """The last that the job does is to deny access to its folders, which binds the agent of an ordinary user, too."""
    locked = "cd $BT_SCRATCH_DIR; mkdir -p a/b; touch a/b/c; trap 'chmod 0 a/b a; exit' TERM"
    with up(shell, BDN_AGENT_SCRATCH_BYTES="16 MiB") as user:
        job = user.start("full", f"{locked}; head -c 40000000 /dev/zero >file; sleep 86399 & wait")
        status, reason = over(user, job)
        assert (status, reason.endswith("[SCRATCH_FULL]")) == ("FAILED", True), reason
        wait_until(lambda: not left_over(shell), what="an empty node")
        wait_until(lambda: not list((shell.data / "cache/jobs/.trash").iterdir()), what="an empty trash")
