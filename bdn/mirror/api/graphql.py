"""``POST /graphql/``: the fields that truss asks for, without a library. Anything else is NOT_SUPPORTED."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Final

from pydantic import JsonValue

from bdn.core.errors import BdnError, InvalidRequestError, NotFoundError, NotSupportedError
from bdn.core.training.serving import Instance, ServedCheckpoint, instances_of, truss_config
from bdn.mirror.access.callers import Caller
from bdn.mirror.api.callers import TeamController
from bdn.mirror.api.v1 import ClientApi
from bdn.net.api_server import new_router, provided
from bdn.wire.access_schema import DEFAULT_TEAM, is_secret_name
from bdn.wire.push_schema import Checkpoint
from bdn.wire.v1_schema import (
    GraphqlAnswer,
    GraphqlError,
    GraphqlRequest,
    NamedCheckpoint,
    TemplateRequest,
)

_MIB: Final = 1024**2
_DEEPEST: Final = 8
_MOST_FIELDS: Final = 10  # of a query itself: each one reads the database
_TOKEN: Final = re.compile(r'[\s,]+|#[^\n]*|([A-Za-z_]\w*|\.\.\.|"(?:[^"\\\n]|\\.)*+"?|-?[0-9][0-9.eE+-]*|.)', re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)

Selection = dict[str, tuple[str, "Selection"]]  # fields by the names that the answer gives them

_Api = Annotated[ClientApi, provided(ClientApi)]

graphql_router = new_router("graphql")


@graphql_router.post(
    "/graphql/", response_model_exclude_unset=True, summary="Teams, organization, instance types, and a dry run"
)
async def graphql(api: _Api, body: GraphqlRequest, caller: TeamController) -> GraphqlAnswer:
    request = body.variables.request if body.variables else None
    fields: dict[str, Callable[[], Awaitable[JsonValue]]] = {
        "teams": lambda: _teams(api, caller),
        "organization": lambda: _organization(caller),
        "listed_instances": lambda: _listed_instances(api),
        "create_model_version_from_inference_template": lambda: _template(api, caller, request),
    }
    try:
        data: dict[str, JsonValue] = {}
        for key, (name, inner) in parse(body.query).items():
            if name not in fields:
                raise _unsupported(f"the GraphQL field {name}")
            data[key] = _picked(await fields[name](), inner)
    except BdnError as error:
        return GraphqlAnswer(data=None, errors=[GraphqlError(message=str(error), extensions={"code": error.code})])
    return GraphqlAnswer(data=data)


def _unsupported(what: str) -> NotSupportedError:
    return NotSupportedError(what, "this service has teams, organization and listed_instances; use the calls of /v1")


# --- the query ---


def parse(query: str) -> Selection:
    """The fields of a query or mutation, without their arguments. Raises ``NotSupportedError`` for all else."""
    tokens = [found[1] for found in _TOKEN.finditer(query) if found[1]][::-1]
    try:
        if tokens[-1] in ("query", "mutation"):
            tokens.pop()
            if tokens[-1] != "{" and _NAME.fullmatch(tokens[-1]):
                tokens.pop()
            _skip_arguments(tokens)
        found = _selection(tokens, 1)
    except IndexError:
        raise _unsupported("a GraphQL query that ends too early") from None
    if tokens:
        raise _unsupported(f"the GraphQL token {tokens[-1][:100]!r} after the query")
    if len(found) > _MOST_FIELDS:
        raise _unsupported(f"a GraphQL query with more than {_MOST_FIELDS} fields")
    return found


def _selection(tokens: list[str], depth: int) -> Selection:
    if (opening := tokens.pop()) != "{" or depth > _DEEPEST:
        raise _unsupported(f"the GraphQL token {opening[:100]!r}")
    fields: Selection = {}
    while (name := tokens.pop()) != "}":
        key = name
        if tokens[-1] == ":":
            tokens.pop()
            name = tokens.pop()
        if not _NAME.fullmatch(name) or not _NAME.fullmatch(key):
            raise _unsupported(f"the GraphQL token {name[:100]!r}")
        _skip_arguments(tokens)
        fields[key] = (name, _selection(tokens, depth + 1) if tokens[-1] == "{" else {})
    return fields


def _skip_arguments(tokens: list[str]) -> None:
    if tokens[-1] == "(":
        depth = 0
        while True:
            depth += {"(": 1, ")": -1}.get(tokens.pop(), 0)
            if not depth:
                return


def _picked(value: JsonValue, selection: Selection) -> JsonValue:
    """The selected fields of a value. Raises ``NotSupportedError`` for one that it does not have."""
    if isinstance(value, list):
        return [_picked(one, selection) for one in value]
    if not isinstance(value, dict):
        return value
    if unknown := [name for name, _ in selection.values() if name not in value]:
        raise _unsupported(f"the GraphQL field {unknown[0]}")
    return {key: _picked(value[name], inner) for key, (name, inner) in selection.items()}


# --- its fields ---


async def _teams(api: ClientApi, caller: Caller) -> JsonValue:
    found = await api.projects.teams(caller.organisation, caller.team)
    return [{"id": one.id, "name": one.name, "default": one.name == DEFAULT_TEAM} for one in found]


async def _organization(caller: Caller) -> JsonValue:
    return {"id": caller.organisation}


async def _instances(api: ClientApi) -> Mapping[str, Instance]:
    """By their ids. truss prompts for a GPU type where any is listed, and takes the one kind without GPUs else."""
    live = await api.training.capacities()
    found = instances_of(Instance(one.cpus, one.memory_bytes, one.gpu_type, one.gpus) for one in live)
    return {one.name: one for one in found}


async def _listed_instances(api: ClientApi) -> JsonValue:
    return [
        {
            "id": name,
            "name": name,
            "display_name": name,
            "millicpu_limit": 1000 * one.cpus,
            "memory_limit": one.memory_bytes // _MIB,
            "gpu_count": one.gpus,
            "gpu_type": one.gpu_type,
            "gpu_memory": None,
            "default": not one.gpus,
            "node_count": 1,
            "price": None,
            "limited_capacity": False,
        }
        for name, one in (await _instances(api)).items()
    ]


async def _template(api: ClientApi, caller: Caller, request: TemplateRequest | None) -> JsonValue:
    """The configuration that would serve checkpoints. Nothing is served here."""
    if request is None:
        raise InvalidRequestError("create_model_version_from_inference_template needs the variable request")
    found = []
    for one in request.weights_sources:
        if one.b10_training_checkpoint_weights_source is None:
            raise NotSupportedError("serving weights other than checkpoints of training jobs", "name a training job")
        found.append(await _checkpoint(api, caller, one.b10_training_checkpoint_weights_source.checkpoint))
    if not request.dry_run:
        sources = ", ".join(one.source for one in found)
        raise NotSupportedError(
            "serving a model",
            f"take {sources} with 'bdn pull', a stage, a pod or another mirror; --dry-run writes a configuration",
        )
    instance = (await _instances(api)).get(request.instance_type_id)
    if instance is None:
        raise NotFoundError(f"instance type {request.instance_type_id!r}")
    variables = request.inference_stack.environment_variables
    secrets = {one.name: one.value for one in variables if one.is_secret_reference}
    if wrong := [name for name in secrets.values() if not is_secret_name(name)]:
        raise InvalidRequestError(f"{wrong[0]!r} cannot be the name of a secret")
    config = truss_config(
        request.metadata.oracle_name,
        instance,
        [_served(one) for one in found],
        {one.name: one.value for one in variables if not one.is_secret_reference},
        secrets,
    )
    return {"model_version": None, "truss_config": json.dumps(config)}


async def _checkpoint(api: ClientApi, caller: Caller, named: NamedCheckpoint) -> Checkpoint:
    job, name = named.training_job_id, named.checkpoint_name
    found = await api.projects.checkpoints(caller.organisation, caller.team, None, job)
    ranks = [one for one in found if one.checkpoint_id == name]
    if not ranks:
        raise NotFoundError(f"checkpoint {name!r} of training job {job}")
    return min(ranks, key=lambda one: one.rank)


def _served(checkpoint: Checkpoint) -> ServedCheckpoint:
    rank = (checkpoint.lora_adapter_config or {}).get("r")
    return ServedCheckpoint(
        checkpoint.job,
        checkpoint.checkpoint_id,
        checkpoint.checkpoint_type,
        checkpoint.base_model,
        rank if isinstance(rank, int) and rank > 0 else None,
    )
