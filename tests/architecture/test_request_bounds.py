"""Every list, text, number and map of every request of both services has a bound, and FastAPI's lists end at their first error."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

import pytest
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bdn.mirror.api.routes import ROUTERS
from bdn.net.api_server import new_service
from node_agent import api as agent_api
from tests.support.network.service import anybody

AGENT = (
    agent_api.stages_router,
    agent_api.pulls_router,
    agent_api.volumes_router,
    agent_api.caches_router,
    agent_api.service_router,
)


def service(name: str) -> FastAPI:
    routers = ROUTERS if name == "mirror" else AGENT
    return new_service(name, limit_request_bytes=1, authenticate=anybody, routers=routers)


def schemas(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each schema of a request's body, and all that it refers to, by its place."""
    named, seen = document["components"]["schemas"], set[str]()

    def inside(place: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in seen:
                seen.add(name)
                yield from inside(name, named[name])
            return
        yield place, schema
        for one in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
            yield from inside(place, one)
        for name, one in schema.get("properties", {}).items():
            yield from inside(f"{place}.{name}", one)
        for part in ("items", "additionalProperties"):
            if isinstance(schema.get(part), dict):
                yield from inside(f"{place}[]", schema[part])

    for path, operations in document["paths"].items():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                yield from inside(path, content["schema"])


def is_bounded(schema: Mapping[str, Any]) -> bool:
    parts, least, most = {"anyOf", "allOf", "$ref"}, {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
    unbounded = re.search(r"[*+]|\{\d*,\}", re.sub(r"\\.|\[[^]]*\]", "", schema.get("pattern", "*")))
    is_known = "enum" in schema or "const" in schema or "x-max-bytes" in schema
    return is_known or {
        "string": "maxLength" in schema or schema.get("format") == "date-time" or unbounded is None,
        "integer": bool(least & schema.keys()) and bool(most & schema.keys()),
        "array": "maxItems" in schema,
        "object": "properties" in schema or "maxProperties" in schema,
        "number": True,  # 64 bits, whatever was written
        "boolean": True,
        "null": True,
    }.get(schema.get("type", ""), bool(parts & schema.keys()))


@pytest.mark.parametrize("name", ["mirror", "agent"])
def test_every_value_of_a_request_has_a_bound(name: str) -> None:
    found = list(schemas(service(name).openapi()))
    assert len(found) > 20
    assert [place for place, schema in found if not is_bounded(schema)] == []


def models(name: str) -> set[type[BaseModel]]:
    found: set[type[BaseModel]] = set()

    def add(kind: Any) -> None:
        if get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel):
            for field in kind.model_fields.values() if kind not in found else ():
                found.add(kind)
                add(field.annotation)
        for one in get_args(kind):
            add(one)

    for router in ROUTERS if name == "mirror" else AGENT:
        for route in router.routes:
            if body := getattr(route, "body_field", None):
                add(body.field_info.annotation)
    return found


def lists(kind: Any, metadata: tuple[Any, ...]) -> Iterator[tuple[Any, bool]]:
    """Each list within an annotation, and whether it ends at the first wrong item."""
    if get_origin(kind) is Annotated:
        inner, *more = get_args(kind)
        flat = [part for one in more for part in (one.metadata if isinstance(one, FieldInfo) else [one])]
        yield from lists(inner, tuple(flat))
        return
    if get_origin(kind) is list:
        yield kind, any(getattr(one, "fail_fast", False) for one in metadata)
    for one in get_args(kind):
        yield from lists(one, ())


@pytest.mark.parametrize("name", ["mirror", "agent"])
def test_every_list_of_a_request_ends_at_its_first_wrong_item(name: str) -> None:
    assert [
        (model.__name__, field)
        for model in models(name)
        for field, info in model.model_fields.items()
        for _, is_fast in lists(info.annotation, tuple(info.metadata))
        if not is_fast
    ] == []
