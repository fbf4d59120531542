"""Training jobs in real containers of podman, pushed by the unmodified truss."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from bdn.mirror.db.secrets import new_key
from tests.doubles.hub import Hub
from tests.doubles.registry import Registry
from tests.doubles.s3 import S3Server
from tests.support.agent.mounts import needs_mounts, unmounting
from tests.support.agent.runs import SCRATCH_BYTES, command_lines
from tests.support.services.cluster import Cluster
from tests.support.services.commands import wait_until
from tests.support.services.podman import IMAGE, ONLY_IN_IMAGE, Podman, needs_podman, podman_with_image
from tests.support.services.training import CLIENTS, User, agent, ended, left_over, over
from tests.support.services.training_scripts import READING, WEIGHTS, check_read_only, publish_weights

pytestmark = [
    pytest.mark.skipif(not CLIENTS.exists(), reason="truss is not installed; make test installs it"),
    needs_podman,
    needs_mounts,
]
LOCAL: Final = f"base_image={IMAGE!r}"
LOGIN: Final = "docker_auth=DockerAuth(auth_method=DockerAuthType.REGISTRY_SECRET, registry={registry!r}, registry_secret_docker_auth=RegistrySecretDockerAuth(secret_ref=SecretReference(name='registry')))"
USERNAME: Final = "puller"
PASSWORD: Final = "sesame-" * 5
WAITING: Final = "trap 'echo saw it; exit 0' TERM; echo up; sleep 86399 & wait"


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    with podman_with_image(tmp_path_factory.mktemp("podman")) as podman:
        yield podman


@pytest.fixture
def cluster(podman: Podman, backend: str, tmp_path: Path, hub: Hub, s3: S3Server) -> Iterator[Cluster]:
    publish_weights(hub, s3)
    with unmounting(tmp_path):
        extra = {"HF_ENDPOINT": hub.url, "AWS_ENDPOINT_URL_S3": s3.url, "BDN_SECRETS_KEY": new_key()}
        cluster = Cluster(tmp_path, extra | podman.environment)
        with cluster.mirror():
            yield cluster


@contextmanager
def user_of(cluster: Cluster) -> Iterator[User]:
    """Beside an agent that runs jobs with podman."""
    small = {"BDN_AGENT_SCRATCH_BYTES": str(SCRATCH_BYTES)}  # the test reads all files of the node
    with agent(cluster, BDN_AGENT_JOB_LAUNCHER="podman", **small) as shell:
        yield User(cluster, shell)


def await_nothing(user: User, podman: Podman) -> None:
    wait_until(lambda: not left_over(user.shell), what="an empty node")
    assert podman.told("ps", "--all", "--quiet") == ""


def test_a_job__runs_the_python_of_its_image_on_read_only_weights(cluster: Cluster, podman: Podman) -> None:
    with user_of(cluster) as user:
        commands = (f"python3 -c 'import {ONLY_IN_IMAGE}'", "python3 script.py")
        job = user.push("demo", *commands, files={"script.py": READING}, weights=WEIGHTS, image=LOCAL)
        assert ended(user, job) == ("COMPLETED", "")
        check_read_only(user.said)
        await_nothing(user, podman)


def test_an_image_of_a_private_registry__is_pulled_with_the_login_of_a_secret(
    cluster: Cluster, podman: Podman, tmp_path: Path
) -> None:
    podman.told("push", "--quiet", IMAGE, f"oci:{tmp_path / 'layout'}")
    with Registry(tmp_path / "layout", USERNAME, PASSWORD) as registry, user_of(cluster) as user:
        podman.trust(registry.address)
        image = f"base_image='{registry.address}/team/python:1'"
        status, reason = over(user, user.start("private", "true", image=image))
        assert (status, "unauthorized" in reason) == ("DEPLOY_FAILED", True), reason

        done = user.shell.run("bdn-admin", "secrets", "set", "registry", given=f"{USERNAME}:{PASSWORD}".encode())
        assert done.code == 0, done.out + done.err
        job = user.start("private", WAITING, image=f"{image}, {LOGIN.format(registry=registry.address)}")
        wait_until(lambda: "up" in user.logs(job), what="the first line")
        (container,) = podman.told("ps", "--quiet").split()
        spoken = [podman.told("inspect", container), *command_lines().values()]
        kept = [path.read_bytes() for path in cluster.root.rglob("*") if path.is_file() and not path.is_symlink()]
        for secret in (PASSWORD, base64.b64encode(f"{USERNAME}:{PASSWORD}".encode()).decode()):
            assert not any(secret in one for one in spoken)
            assert not any(secret.encode() in one for one in kept)

        assert user.truss("stop", "--job-id", job).code == 0
        assert over(user, job) == ("STOPPED", "")
        assert "saw it" in user.logs(job)
        await_nothing(user, podman)


def test_memory__over_its_limit__fails_the_job_with_137(cluster: Cluster, podman: Podman) -> None:
    with user_of(cluster) as user:
        command = "echo before; python3 -c 'print(len(b\"x\" * (1 << 30)))'"
        job = user.start("memory", command, image=LOCAL, compute='memory="256Mi"')
        status, reason = over(user, job)
        assert (status, "was killed (exit code 137)" in reason) == ("FAILED", True), reason
        assert "before" in user.logs(job)
        await_nothing(user, podman)


def test_a_container__runs_on_while_its_agent_restarts(cluster: Cluster, podman: Podman) -> None:
    with user_of(cluster) as user:
        job = user.start("adopted", "echo up; until [ -e /mnt/go ]; do sleep 0.1; done; echo over", image=LOCAL)
        wait_until(lambda: "up" in user.logs(job), what="the first line")
    podman.told("exec", "--latest", "sh", "-c", ": >/mnt/go")
    with user_of(cluster) as user:
        assert over(user, job) == ("COMPLETED", "")
        said = user.logs(job)
        assert (said.count(") up"), said.count(") over")) == (1, 1), said
        await_nothing(user, podman)
