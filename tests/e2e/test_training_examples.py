"""The examples of training jobs, pushed from their own folders by the unmodified truss."""

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from safetensors import TensorSpec, serialize
from safetensors.numpy import load

from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Server
from tests.support.agent.mounts import needs_mounts, unmounting
from tests.support.agent.runs import needs_bwrap
from tests.support.services.cluster import Cluster
from tests.support.services.commands import ROOT
from tests.support.services.training import CLIENTS, User, agent, over

pytestmark = [
    pytest.mark.skipif(not CLIENTS.exists(), reason="truss is not installed; make test installs it"),
    needs_bwrap,
    needs_mounts,
]
EXAMPLES: Final = ROOT / "examples/training"
VOCABULARY: Final = {"good": 0, "bad": 1, "\u0120film": 2, "\u0120book": 3}
EMBEDDINGS: Final = ((1.0, 0.5), (-1.0, 0.5), (0.25, -2.0), (-0.25, -2.0))  # exact in bfloat16
TEXTS: Final = {"good film": 1, "good book": 1, "bad film": 0, "bad book": 0}


def model() -> dict[str, bytes]:
    """A model of two files, of which the second has the embeddings, as Qwen's have them."""
    return {
        "tokenizer.json": json.dumps({"model": {"type": "BPE", "vocab": VOCABULARY}}).encode(),
        "model-00001-of-00002.safetensors": weights("model.norm.weight", ((1.0, 1.0),)),
        "model-00002-of-00002.safetensors": weights("model.embed_tokens.weight", EMBEDDINGS),
    }


def weights(name: str, rows: Sequence[Sequence[float]]) -> bytes:
    """One tensor of bfloat16, the upper half of a float, which numpy does not have."""
    halves = (np.array(rows, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    place = {"data_ptr": halves.ctypes.data, "data_len": halves.nbytes}
    return bytes(serialize({name: TensorSpec(dtype="bfloat16", shape=halves.shape, **place)}))


@pytest.fixture(scope="module")
def user(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """Of a cluster of two nodes, whose upstreams have the sources that the examples name."""
    root = tmp_path_factory.mktemp("examples")
    with Hub() as hub, S3Server() as s3, unmounting(root):
        hub.repo("Qwen/Qwen3-0.6B").commit(model())
        lines = [json.dumps({"text": text, "label": label}) for text, label in TEXTS.items()]
        s3.bucket("my-bucket", public=True).put({"training-data/texts.jsonl": "\n".join(lines).encode()})
        cluster = Cluster(root, {"HF_ENDPOINT": hub.url, "AWS_ENDPOINT_URL_S3": s3.url})
        with cluster.mirror(), agent(cluster) as shell, agent(cluster, "node-2"):
            yield User(cluster, shell)


def completed(user: User, example: str) -> tuple[str, str]:
    """Push an example, and wait until its job has completed. Returns the job's id, and its log in one line."""
    job = user.push_config(EXAMPLES / example / "config.py")
    end, log = over(user, job), user.shell.run("bdn", "jobs", "logs", job).out
    assert end == ("COMPLETED", ""), log
    return job, " ".join(log.split())


def checkpoint(user: User, job: str, name: str) -> dict[str, bytes]:
    """The files of a checkpoint by their names, from the addresses that the job's files have."""
    with user.cluster.http() as http:
        path = f"/v1/training_projects/{user.job(job)['training_project_id']}/jobs/{job}/checkpoint_files"
        files = http.get(path).raise_for_status().json()["presigned_urls"]
        found = [one for one in files if one["relative_file_name"].startswith(f"{name}/")]
        return {Path(one["relative_file_name"]).name: http.get(one["url"]).raise_for_status().content for one in found}


def test_every_example__has_its_command_in_the_readme() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    examples = sorted(path.parent.name for path in EXAMPLES.glob("*/config.py"))
    assert examples == ["qwen", "resume", "two_nodes"]
    for name in examples:
        assert f"bdn truss train push examples/training/{name}/config.py --tail\n" in readme


def test_the_qwen_example__trains_on_its_weights_and_finds_its_tokens_in_the_cache(user: User) -> None:
    job, said = completed(user, "qwen")
    assert "tokenized 4 examples" in said
    assert "read 4 embeddings of 2 values from model-00002-of-00002.safetensors" in said
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)

    listed = user.truss("checkpoints", "list", "--job-id", job, "-o", "json").document["checkpoints"]
    assert [one["checkpoint_id"] for one in listed] == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]
    files = checkpoint(user, job, "checkpoint-30")
    assert json.loads(files["trainer_state.json"]) == {"global_step": 30, "loss": pytest.approx(losses[-1], abs=1e-4)}
    (head,) = load(files["model.safetensors"])["score.weight"]
    good, bad = (head @ EMBEDDINGS[VOCABULARY[word]] for word in ("good", "bad"))
    assert good > 0 > bad

    _, said = completed(user, "qwen")
    assert "an earlier job left tokens-" in said
    assert [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)] == losses


def test_the_example_of_two_nodes__fits_the_points_of_both(user: User) -> None:
    _, said = completed(user, "two_nodes")
    points = [x / 10 for x in range(20)]
    assert "rank 0 of 2 has the points from x = 0.0 to 0.9" in said
    assert "rank 1 of 2 has the points from x = 1.0 to 1.9" in said
    slope, intercept = statistics.linear_regression(points, [x * x for x in points])
    for rank in range(2):
        assert f"rank {rank}: y = {slope:.3f} x {intercept:+.3f}" in said


def test_the_example_of_resuming__continues_the_job_before(user: User) -> None:
    _, first = completed(user, "resume")
    _, second = completed(user, "resume")
    losses = re.findall(r"loss ([\d.]+)", first + second)
    assert "starting with loss" in first
    assert "saved step 20" in first
    assert "resuming after step 20" in second
    assert "saved step 40" in second
    assert losses[1] == losses[2]
    assert float(losses[0]) > float(losses[1]) > float(losses[3])
