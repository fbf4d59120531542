"""Kinds of nodes, and the configuration with which vLLM serves checkpoints."""

import shlex

import pytest

from bdn.core.errors import InvalidRequestError
from bdn.core.training.serving import Instance, ServedCheckpoint, instances_of, truss_config

GIB = 1024**3
H200 = Instance(64, 512 * GIB, "H200", 8)
FULL = ServedCheckpoint("job0000001", "checkpoint 24", "full")
LORA = ServedCheckpoint("job0000001", "checkpoint-48", "lora", "org/base", 12)
OTHER = ServedCheckpoint("job0000002", "checkpoint-96", "lora", "org/base")


@pytest.mark.parametrize(("nodes", "expected"), [
    ([], ["CPU:1"]),
    ([Instance(4, 8 * GIB), Instance(2, 16 * GIB)], ["CPU:4"]),
    ([H200, Instance(96, GIB, "H200", 8), Instance(8, GIB, "A100_40GB", 1), Instance(8, GIB, "H200", 1), Instance(4, GIB, "L4")],
     ["CPU:96", "A100_40GB:1", "H200:1", "H200:8"]),
])  # fmt: skip
def test_instances__are_one_without_gpus_and_each_type_and_count_of_gpus(
    nodes: list[Instance], expected: list[str]
) -> None:
    assert [one.name for one in instances_of(nodes)] == expected


def test_an_instance__has_the_most_of_the_nodes_of_its_kind() -> None:
    cpu, gpu = instances_of([H200, Instance(96, GIB, "H200", 8)])
    assert (cpu, gpu) == (Instance(96, 512 * GIB), Instance(96, 512 * GIB, "H200", 8))


def words(*checkpoints: ServedCheckpoint, instance: Instance = H200) -> list[str]:
    """The words of the command that the container's shell executes."""
    config = truss_config("m", instance, checkpoints, {"A": "b"}, {"HF_TOKEN": "hf_access_token"})
    server = config["docker_server"]
    assert isinstance(server, dict)
    shell, option, command = shlex.split(server["start_command"])
    assert (shell, option) == ("sh", "-c")
    given, is_exec, *rest = shlex.split(command.replace("$(cat /secrets/hf_access_token)", "SECRET"))
    assert (given, is_exec) == ("HF_TOKEN=SECRET", "exec")
    return rest


def test_a_full_checkpoint__is_served_from_its_directory_on_all_gpus() -> None:
    place = "/tmp/training_checkpoints/job0000001/rank-0/checkpoint 24/"
    assert words(FULL) == [
        "vllm",
        "serve",
        place,
        "--served-model-name",
        "m",
        "--tensor-parallel-size",
        "8",
        "--port",
        "8000",
    ]
    assert "--tensor-parallel-size" not in words(FULL, instance=Instance(1, GIB))


def test_adapters__are_served_on_their_base_model_with_a_rank_that_vllm_accepts() -> None:
    served = words(LORA, OTHER, instance=Instance(1, GIB))
    assert served[2:6] == ["org/base", "--enable-lora", "--max-lora-rank", "16"]
    assert served[7:9] == [
        "checkpoint-48=/tmp/training_checkpoints/job0000001/rank-0/checkpoint-48/",
        "checkpoint-96=/tmp/training_checkpoints/job0000002/rank-0/checkpoint-96/",
    ]


def test_a_configuration__names_files_by_job_and_secrets_without_values() -> None:
    config = truss_config("m", H200, [LORA, OTHER], {"A": "b"}, {"HF_TOKEN": "hf_access_token"})
    assert config["training_checkpoints"] == {
        "download_folder": "/tmp/training_checkpoints",
        "artifact_references": [
            {"training_job_id": "job0000001", "paths": ["rank-0/checkpoint-48/"]},
            {"training_job_id": "job0000002", "paths": ["rank-0/checkpoint-96/"]},
        ],
    }
    assert (config["secrets"], config["environment_variables"]) == ({"hf_access_token": None}, {"A": "b"})
    assert config["resources"] == {"cpu": "64", "memory": f"{512 * 1024}Mi", "accelerator": "H200:8", "use_gpu": True}


@pytest.mark.parametrize("checkpoints", [
    [FULL, LORA], [FULL, FULL], [ServedCheckpoint("j", "adapter", "lora")],
])  # fmt: skip
def test_what_vllm_does_not_serve__is_refused(checkpoints: list[ServedCheckpoint]) -> None:
    with pytest.raises(InvalidRequestError):
        truss_config("m", H200, checkpoints, {}, {})
