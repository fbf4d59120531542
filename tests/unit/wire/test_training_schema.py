"""Requests of training jobs: what clients send is understood, and what they will send one day is named."""

from typing import Any, Final

import pytest
from pydantic import ValidationError

from bdn.core.training.environment import JobPlaces
from bdn.core.training.placement import Demand
from bdn.wire.training_schema import Compute, InstanceType, LogQuery, Runtime, TrainingJobRequest, TrainingJobSpec


def spec(**fields: Any) -> TrainingJobSpec:
    return TrainingJobSpec.model_validate({"runtime": {"start_commands": ["true"]}, **fields})


def test_unset_fields__are_null_or_absent() -> None:
    names = TrainingJobSpec.model_fields
    unset = TrainingJobSpec.model_validate(dict.fromkeys(names))
    assert unset.model_dump() == TrainingJobSpec.model_validate({}).model_dump()
    assert unset.places == JobPlaces()
    assert unset.compute.demand == Demand(1)


def test_unknown_fields__are_named_by_their_paths_unless_they_are_null() -> None:
    given = {
        "a": 1,
        "b": None,
        "compute": {"c": [1], "accelerator": {"d": {"e": 1}}},
        "runtime": {"cache_config": {"f": 0}},
    }
    request = TrainingJobRequest.model_validate({"training_job": given, "g": True})
    assert request.unknown_fields() == [
        "g",
        "training_job.a",
        "training_job.compute.accelerator.d",
        "training_job.compute.c",
        "training_job.runtime.cache_config.f",
    ]
    many = TrainingJobSpec.model_validate({f"{number:03}{'x' * 200}": 1 for number in range(60)}).unknown_fields()
    assert (len(many), len(many[0])) == (20, 100)
    with pytest.raises(ValidationError, match="more than 64 fields"):
        TrainingJobSpec.model_validate({str(number): 1 for number in range(65)})


DEMANDS: Final[list[tuple[dict[str, Any], Demand, str]]] = [
    ({}, Demand(1), "CPU:1"),
    ({"node_count": 3, "cpu_count": 16}, Demand(3), "CPU:16"),
    ({"accelerator": {"accelerator": "H200", "count": 8}}, Demand(1, "H200", 8), "H200:8"),
    ({"accelerator": {"accelerator": "H200", "count": None}}, Demand(1, "H200", 1), "H200:1"),
    ({"accelerator": {"accelerator": "H200", "count": 0}}, Demand(1), "CPU:1"),
    ({"accelerator": {"accelerator": None, "count": 1}}, Demand(1), "CPU:1"),
]


@pytest.mark.parametrize(("given", "demand", "name"), DEMANDS)
def test_compute__is_a_demand_and_an_instance_type(given: dict[str, Any], demand: Demand, name: str) -> None:
    compute = Compute.model_validate(given)
    shown = InstanceType.of(compute)
    assert (compute.demand, shown.id, shown.name, shown.gpu_count) == (demand, name, name, demand.gpus)


def test_memory__is_a_size() -> None:
    assert Compute.model_validate({"memory": "8Gi"}).memory_bytes == 8 * 1024**3
    assert InstanceType.of(Compute.model_validate({"memory": "8Gi", "cpu_count": 4})).memory_limit_mib == 8192
    assert Compute.model_validate({}).memory_bytes is None
    with pytest.raises(ValidationError, match="not a size"):
        Compute.model_validate({"memory": "much"})


CACHES: Final[list[tuple[dict[str, Any], str | None, bool]]] = [
    ({}, None, False),
    ({"cache_config": {"enabled": False}, "enable_cache": False}, None, False),
    ({"cache_config": {"enabled": True}}, "/root/.cache", False),
    ({"cache_config": {"enabled": True, "enable_legacy_hf_mount": True}}, "/root/.cache", True),
    ({"cache_config": {"enabled": True, "enable_legacy_hf_cache": True}}, "/root/.cache", True),
    ({"cache_config": {"enabled": True, "mount_base_path": "/data/"}}, "/data", False),
    ({"enable_cache": True}, "/root/.cache", True),
]


@pytest.mark.parametrize(("given", "base", "huggingface"), CACHES)
def test_places__of_the_training_cache(given: dict[str, Any], base: str | None, huggingface: bool) -> None:
    places = spec(runtime=given).places
    assert (places.caches, places.huggingface) == (base, huggingface)


def test_places__of_checkpoints() -> None:
    named = [{"typ": "baseten_named_checkpoint", "checkpoint_name": "c", "job_id": "j"}]
    loading = {"enabled": True, "checkpoints": named}
    given = spec(runtime={"checkpointing_config": {"enabled": True}, "load_checkpoint_config": loading})
    assert (given.places.checkpoints, given.places.loaded) == ("/mnt/ckpts", "/tmp/loaded_checkpoints")
    assert given.runtime.checkpointing is not None
    assert given.runtime.checkpointing.size_bytes is None  # the node decides
    off = spec(
        runtime={"checkpointing_config": {"checkpoint_path": "/x"}, "load_checkpoint_config": {"checkpoints": named}}
    )
    assert off.places == JobPlaces()
    assert spec(enable_baseten_workdir=False).places.working is None


def test_secrets__are_those_of_variables_and_of_the_registry() -> None:
    auth = {
        "auth_method": "REGISTRY_SECRET",
        "registry": "r",
        "registry_secret_docker_auth": {"secret_ref": {"name": "l"}},
    }
    variables = {"A": "plain", "B": {"name": "s"}, "C": {"name": "s"}}
    given = spec(image={"docker_auth": auth}, runtime={"environment_variables": variables})
    assert given.secret_names == ["l", "s"]
    assert given.runtime.plain == {"A": "plain"}
    assert given.runtime.secrets == {"B": "s", "C": "s"}
    assert Runtime.model_validate(given.runtime.model_dump(mode="json")).secrets == given.runtime.secrets


def test_a_limit_of_a_page__is_bounded() -> None:
    assert LogQuery.model_validate({"limit": None}).limit is None
    with pytest.raises(ValidationError):
        LogQuery.model_validate({"limit": 1001})
