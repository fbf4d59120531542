"""Requests whose one value is at its bound, or one beyond it, by a service's own description."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.support.crash.spoiled import Spoiler

_FIRST: Final = "0"  # item of a list
_LARGEST: Final = 4 * 1024**2  # bytes of a request
_MOST: Final = 200_000  # characters or items of one value: beyond it the request's own bound is met first


@dataclass(frozen=True)
class Bounded:
    """One request; ``what`` is the value and its bound."""

    method: str
    path: str
    body: bytes
    what: str
    is_beyond: bool


@dataclass(frozen=True)
class Bounds:
    """Makes them from an OpenAPI document."""

    document: Mapping[str, Any]

    def requests(self) -> Iterator[Bounded]:
        """Those of each operation with a body: each field of the body, and of what is in it."""
        spoiler = Spoiler(self.document)
        for path, operations in self.document["paths"].items():
            for method, operation in operations.items():
                for content in operation.get("requestBody", {}).get("content", {}).values():
                    right = spoiler.right(content["schema"])
                    for place, schema in self._places(content["schema"], ()):
                        for value, is_beyond in self._values(schema, spoiler):
                            body = json.dumps(_put(right, place, value)).encode()
                            if len(body) > _LARGEST:
                                continue
                            what = f"{'.'.join(map(str, place))}: {str(schema)[:80]}"
                            yield Bounded(method, path.replace("{", "").replace("}", ""), body, what, is_beyond)

    def _places(self, schema: Mapping[str, Any], at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Each field of objects, also of those in lists and maps, with its schema."""
        if "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        choices = schema.get("anyOf", ())
        takes_any_number = any(one.get("type") == "number" for one in choices)
        for one in choices:
            if not (takes_any_number and one.get("type") == "integer"):
                yield from self._places(one, at)
        if at:
            yield at, schema
        for name, inside in schema.get("properties", {}).items():
            yield from self._places(inside, (*at, name))
        if schema.get("type") == "array" and "items" in schema:  # and is not of a fixed length
            yield from self._places(schema["items"], (*at, _FIRST))
        if isinstance(inside := schema.get("additionalProperties"), dict):
            yield from self._places(inside, (*at, "key"))

    def _values(self, schema: Mapping[str, Any], spoiler: Spoiler) -> Iterator[tuple[Any, bool]]:
        for name in ("maximum", "exclusiveMaximum"):
            if name in schema:
                yield schema[name], name == "exclusiveMaximum"
                yield schema[name] * 2 + 1, True
        for name in ("minimum", "exclusiveMinimum"):
            if name in schema:
                yield schema[name] - 1, True
        if (most := schema.get("maxLength", _MOST)) < _MOST:
            yield "/" + "x" * (most - 1), False
            yield "/" + "x" * most, True
        if (most := schema.get("maxItems", _MOST)) < _MOST and "items" in schema:
            item = spoiler.right(schema["items"])
            yield [item] * most, False
            yield [item] * (most + 1), True
        if (most := schema.get("maxProperties", _MOST)) < _MOST:
            inside = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties", True)][0]
            item = spoiler.right(inside) if inside is not True else 0
            yield {f"k{number}": item for number in range(most)}, False
            yield {f"k{number}": item for number in range(most + 1)}, True


def _put(document: Any, at: tuple[str, ...], value: Any) -> Any:
    if not at:
        return value
    if at[0] == _FIRST:
        return [_put(document[0] if isinstance(document, list) and document else {}, at[1:], value)]
    inside = document if isinstance(document, dict) else {}
    return {**inside, at[0]: _put(inside.get(at[0]), at[1:], value)}
