"""The part of GraphQL that ``POST /graphql/`` reads."""

import pytest

from bdn.core.errors import NotSupportedError
from bdn.mirror.api.graphql import Selection, parse

NONE: Selection = {}


@pytest.mark.parametrize(("query", "expected"), [
    ("{ teams { id name } }", {"teams": ("teams", {"id": ("id", NONE), "name": ("name", NONE)})}),
    ("query Teams { teams { id, default } }", {"teams": ("teams", {"id": ("id", NONE), "default": ("default", NONE)})}),
    ("query { listed: listed_instances { gpuType: gpu_type } }",
     {"listed": ("listed_instances", {"gpuType": ("gpu_type", NONE)})}),
    ("mutation ($request: Request!) {\n# a comment { \n make(request: $request) { model_version { id } } }",
     {"make": ("make", {"model_version": ("model_version", {"id": ("id", NONE)})})}),
    ('query Q($a: [Int!] = [1]) { f(x: "a ) \\" {", y: {z: (1)}) other }', {"f": ("f", NONE), "other": ("other", NONE)}),
    ("{}", NONE),
])  # fmt: skip
def test_a_query__is_its_fields_by_the_names_of_the_answer(query: str, expected: Selection) -> None:
    assert parse(query) == expected


@pytest.mark.parametrize("query", [
    "", " ", "{", "{ a {", "{ a } }", "{ a } { b }", "{ a(", "{ a: }", "{ ...F }", "{ a @include(if: true) }", "query", "query Q(",
    "subscription { a }", "fragment F on X { a }", "{ 1 }", '{ "a" }', "{ a { ... on X { b } } }", "{" + "a {" * 60_000, "{ \u00e9 }",
    '{ f(x: "a) }', "{ f(x: " + '\\"' * 30_000,  # a string that never ends is one token, read once
    "{" + "".join(f" f{number}" for number in range(11)) + " }",
])  # fmt: skip
def test_anything_else__is_not_supported(query: str) -> None:
    with pytest.raises(NotSupportedError):
        parse(query)
