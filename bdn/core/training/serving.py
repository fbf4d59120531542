"""How a checkpoint would be served: kinds of nodes, and a configuration of truss with vLLM."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import InvalidRequestError
from bdn.core.training.checkpoints import CheckpointType

_FOLDER: Final = "/tmp/training_checkpoints"  # noqa: S108 - in the container of the model
_IMAGE: Final = "vllm/vllm-openai:latest"
_PORT: Final = 8000
_LORA_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM accepts as --max-lora-rank
_USUAL_RANK: Final = 16
_MIB: Final = 1024**2


@dataclass(frozen=True, slots=True)
class Instance:
    """A kind of node; ``gpu_type`` is spelled as truss spells it."""

    cpus: int
    memory_bytes: int
    gpu_type: str | None = None
    gpus: int = 0

    @property
    def name(self) -> str:
        return f"{self.gpu_type}:{self.gpus}" if self.gpus else f"CPU:{self.cpus}"


_SMALLEST: Final = Instance(1, 2 * 1024**3)


def instances_of(nodes: Iterable[Instance]) -> list[Instance]:
    """One kind without GPUs, then each type and count of GPUs among the nodes, with the largest CPUs and memory."""
    known = list(nodes)
    groups: dict[tuple[str, int], list[Instance]] = {}
    for one in known:
        if one.gpu_type is not None and one.gpus:
            groups.setdefault((one.gpu_type, one.gpus), []).append(one)
    return [
        _largest(known or [_SMALLEST]),
        *(_largest(group, gpu_type, gpus) for (gpu_type, gpus), group in sorted(groups.items())),
    ]


def _largest(nodes: Sequence[Instance], gpu_type: str | None = None, gpus: int = 0) -> Instance:
    return Instance(max(one.cpus for one in nodes), max(one.memory_bytes for one in nodes), gpu_type, gpus)


@dataclass(frozen=True, slots=True)
class ServedCheckpoint:
    """``lora_rank`` is the ``r`` of an adapter's configuration, None if it has none."""

    job: str
    name: str
    type: CheckpointType
    base_model: str | None = None
    lora_rank: int | None = None

    @property
    def path(self) -> str:
        return f"rank-0/{self.name}/"


def truss_config(
    model_name: str,
    instance: Instance,
    checkpoints: Sequence[ServedCheckpoint],
    variables: Mapping[str, str],
    secrets: Mapping[str, str],
) -> dict[str, object]:
    """The ``config.yaml`` of a model that serves these checkpoints. ``secrets`` has names of secrets by variable.

    Raises ``InvalidRequestError``: vLLM does not serve these checkpoints together, or an adapter has no base model.
    """
    paths: dict[str, list[str]] = {}
    for one in checkpoints:
        paths.setdefault(one.job, []).append(one.path)
    resources = {"cpu": str(instance.cpus), "memory": f"{instance.memory_bytes // _MIB}Mi"}
    if instance.gpus:
        resources["accelerator"] = instance.name
    kind = "audio/transcriptions" if checkpoints[0].type == "whisper" else "chat/completions"
    return {
        "model_name": model_name,
        "python_version": "py311",
        "base_image": {"image": _IMAGE},
        "docker_server": {
            "start_command": _command(model_name, instance, checkpoints, secrets),
            "readiness_endpoint": "/health",
            "liveness_endpoint": "/health",
            "predict_endpoint": f"/v1/{kind}",
            "server_port": _PORT,
        },
        "resources": {**resources, "use_gpu": bool(instance.gpus)},
        "training_checkpoints": {
            "download_folder": _FOLDER,
            "artifact_references": [{"training_job_id": job, "paths": some} for job, some in paths.items()],
        },
        "environment_variables": dict(variables),
        "secrets": dict.fromkeys(secrets.values()),
    }


def _command(
    model_name: str, instance: Instance, checkpoints: Sequence[ServedCheckpoint], secrets: Mapping[str, str]
) -> str:
    first = checkpoints[0]
    places = [f"{_FOLDER}/{one.job}/{one.path}" for one in checkpoints]
    if all(one.type == "lora" for one in checkpoints):
        if first.base_model is None:
            raise InvalidRequestError(f"the adapter {first.name!r} of job {first.job} does not name its base model")
        needed = max(one.lora_rank or _USUAL_RANK for one in checkpoints)
        rank = next((one for one in _LORA_RANKS if one >= needed), needed)
        modules = [f"{one.name}={place}" for one, place in zip(checkpoints, places, strict=True)]
        served = [first.base_model, "--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", *modules]
    elif len(checkpoints) > 1:
        raise InvalidRequestError("vLLM serves one full checkpoint, or several adapters: choose one checkpoint")
    else:
        served = [places[0], "--served-model-name", model_name]
    if instance.gpus > 1:
        served += ["--tensor-parallel-size", str(instance.gpus)]
    given = "".join(f"{variable}=$(cat /secrets/{secret}) " for variable, secret in secrets.items())
    return f"sh -c {shlex.quote(given + 'exec ' + shlex.join(['vllm', 'serve', *served, '--port', str(_PORT)]))}"
