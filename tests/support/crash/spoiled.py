"""Requests that are right by a service's own description but for one text or number: what fuzzers that make up text seldom make up."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

NUMBERS: Final = ("1e999", "NaN", "-1", "253402300800", "9223372036854775808", "9" * 400)
_TEXTS: Final = ("a\0b", "\ud800", "../..", "/" + "x" * 300, "x" * 100_000)
_IN_ADDRESSES: Final = ("a%00b", "%ED%A0%80", "%FF", "%2e%2e", "1e999", "9" * 30, "x" * 5000)
_RIGHT: Final = (
    "x",
    "IN_USE",
    "b3:" + "0" * 64,
    "mir_" + "0" * 24,
    "a/1",
    "/x",
    "kind",
    "0" * 32,
    "0" * 10,
)  # one of them has any pattern of ours
_SPOILT: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Spoiled:
    """One request; ``what`` was done to it."""

    method: str
    path: str
    body: bytes | None
    what: str


@dataclass(frozen=True)
class Spoiler:
    """Makes them from an OpenAPI document. ``also`` are texts that mean something to the service, such as a path."""

    document: Mapping[str, Any]
    also: tuple[str, ...] = ()

    def requests(self) -> Iterator[Spoiled]:
        """All of them; each place is spoiled beside every field, and beside those alone that a request must have."""
        for path, operations in self.document["paths"].items():
            for method, operation in operations.items():
                right = re.sub(r"\{\w+\}", "x", path)
                for text in _IN_ADDRESSES if "{" in path else ():
                    yield Spoiled(method, re.sub(r"\{\w+\}", text, path), None, text[:20])
                for given in operation.get("parameters", ()):
                    for text in _IN_ADDRESSES if given["in"] == "query" else ():
                        yield Spoiled(method, f"{right}?{given['name']}={text}", None, f"{given['name']}={text[:20]}")
                if "requestBody" in operation:
                    (content,) = operation["requestBody"]["content"].values()
                    for body, what in self._bodies(content["schema"]):
                        yield Spoiled(method, right, body, what)

    def _bodies(self, schema: Mapping[str, Any]) -> Iterator[tuple[bytes, str]]:
        known = self._resolved(schema)
        every = self.right(known)
        must = {name: every[name] for name in known.get("required", ())}
        optional = [name for name in every if name not in must]
        examples = [(every, set(every)), *(({**must, name: every[name]}, {name}) for name in optional)]
        if optional:
            examples.append((must, set(must)))
        for example, names in examples:
            for place, leaf in _leaves(example):
                if place[0] not in names:
                    continue  # it is spoiled in another example
                if isinstance(leaf, str):
                    for text in (*_TEXTS, *self.also):
                        yield json.dumps(_put(example, place, text)).encode(), f"{place}: {text[:20]!r}"
                elif not isinstance(leaf, bool):
                    for number in NUMBERS:
                        body = json.dumps(_put(example, place, _SPOILT)).replace(json.dumps(_SPOILT), number)
                        yield body.encode(), f"{place}: {number[:20]}"

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema or "anyOf" in schema:
            if "anyOf" in schema:
                schema = schema["anyOf"][0]
            else:
                schema = self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema

    def right(self, schema: Mapping[str, Any]) -> Any:
        """A value that is right."""
        known = self._resolved(schema)
        if "enum" in known or "const" in known:
            return known.get("const", known.get("enum", [None])[0])
        if known.get("type") == "object":
            named = {name: self.right(inside) for name, inside in known.get("properties", {}).items()}
            others = known.get("additionalProperties")
            return named or ({"x": self.right(others)} if isinstance(others, dict) else {})
        if known.get("type") == "array":
            return [self.right(one) for one in known.get("prefixItems", (known.get("items"),))]
        if known.get("type") == "string":
            return next(text for text in _RIGHT if re.search(known.get("pattern", ""), text))
        return False if known.get("type") == "boolean" else known.get("minimum", 1)


def _leaves(document: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    inside = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for name, value in inside:
        yield from _leaves(value, (*at, name))
    if not isinstance(document, dict | list):
        yield at, document


def _put(document: Any, at: tuple[str | int, ...], value: str) -> Any:
    if not at:
        return value
    if isinstance(document, dict):
        return {name: _put(inside, at[1:], value) if name == at[0] else inside for name, inside in document.items()}
    return [_put(inside, at[1:], value) if number == at[0] else inside for number, inside in enumerate(document)]
