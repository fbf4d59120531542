"""A selector of an eviction says one thing: what."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bdn.core.errors import InvalidRequestError
from bdn.wire.operation_schema import EvictionRequest

ONE_EACH: list[dict[str, Any]] = [
    {"source": "hf://o/r"},
    {"manifest": "b3:00"},
    {"job": "job-1"},
    {"lru_bytes": 1},
    {"all": True},
]


@pytest.mark.parametrize("what", ONE_EACH, ids=str)
def test_one_selector_is_enough_and_the_rest_narrows_where(what: dict[str, Any]) -> None:
    EvictionRequest.model_validate(what).check()
    EvictionRequest.model_validate(what | {"tier": "node", "cluster": "c", "node": "n", "dry_run": True}).check()


@pytest.mark.parametrize("where", [{}, {"tier": "node"}, {"cluster": "c", "force": True}, {"all": False}], ids=str)
def test_saying_nothing_is_refused_and_does_not_mean_everything(where: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="not by nothing"):
        EvictionRequest.model_validate(where).check()


@pytest.mark.parametrize("first", ONE_EACH, ids=str)
@pytest.mark.parametrize("second", ONE_EACH, ids=str)
def test_two_selectors_are_refused(first: dict[str, Any], second: dict[str, Any]) -> None:
    if first == second:
        return
    with pytest.raises(InvalidRequestError, match="exactly one"):
        EvictionRequest.model_validate(first | second).check()


@pytest.mark.parametrize(
    "body",
    [{"lru_bytes": 0}, {"lru_bytes": -1}, {"all": "yes"}, {"tier": "disk"}, {"sauce": "hf://o/r"}, {"job": 7}],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EvictionRequest.model_validate(body)
