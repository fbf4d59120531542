"""Dates of clocks that are far off, selectors that say one thing, and secrets that nothing repeats."""

import base64
import gzip
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from pydantic import ValidationError

from bdn.core.errors import InvalidRequestError, LimitExceededError
from bdn.core.events import Event
from bdn.core.units import format_time
from bdn.wire.access_schema import LIMIT_VALUE_BYTES, SecretBody, is_secret_name
from bdn.wire.cache_schema import unpack
from bdn.wire.event_schema import EventDocument
from bdn.wire.operation_schema import EvictionRequest
from bdn.wire.push_schema import CheckpointDetails, CommitRequest, skipped_within_bounds
from bdn.wire.shapes import moment


@pytest.mark.parametrize(("seconds", "date"), [
    (0.0, "1970-01-01T00:00:00+00:00"), (-1.0, "1969-12-31T23:59:59+00:00"),
    (1_800_000_000.5, "2027-01-15T08:00:00.500000+00:00"), (253_402_300_799.0, "9999-12-31T23:59:59+00:00"),
    (253_402_300_800.0, "9999-12-31T23:59:59+00:00"), (1e18, "9999-12-31T23:59:59+00:00"),
    (1e308, "9999-12-31T23:59:59+00:00"), (-62_135_596_801.0, "0001-01-01T00:00:00+00:00"),
    (-1e308, "0001-01-01T00:00:00+00:00"),
])  # fmt: skip
def test_a_time_is_a_date_or_the_nearest_that_there_is(seconds: float, date: str) -> None:
    assert moment(seconds).isoformat() == date


@pytest.mark.parametrize("at", [1e18, -1e18, 1e308, -1e308])
def test_an_agent_whose_clock_is_far_off_shows_its_own_events_and_they_are_read_again(at: float) -> None:
    found = replace(Event.of("found", {"bytes_whole": 10**400, "bytes_total": 10**400}), id="run/1", at=at)

    read = EventDocument.model_validate_json(EventDocument.of(found).model_dump_json()).event()

    assert replace(read, at=at) == found
    assert format_time(read.at).endswith(("9999-12-31 23:59:59Z", "1-01-01 00:00:00Z"))


ONE_EACH: list[dict[str, Any]] = [
    {"source": "hf://o/r"}, {"manifest": "b3:00"}, {"job": "job-1"}, {"lru_bytes": 1}, {"all": True},
]  # fmt: skip


WHERE: dict[str, Any] = {"tier": "node", "cluster": "c", "node": "n", "dry_run": True}


@pytest.mark.parametrize("selector", ONE_EACH, ids=str)
def test_one_selector_is_enough_wherever_it_is_to_be(selector: dict[str, Any]) -> None:
    for given in (selector, selector | WHERE):
        request = EvictionRequest.model_validate(given)
        request.check()
        assert request.model_dump(exclude_defaults=True) == given


@pytest.mark.parametrize(("first", "second"), [*combinations(ONE_EACH, 2)], ids=str)
def test_two_selectors_are_refused(first: dict[str, Any], second: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="exactly one"):
        EvictionRequest.model_validate(first | second | WHERE).check()


@pytest.mark.parametrize("where", [{}, {"tier": "node"}, {"cluster": "c", "force": True}, {"all": False}], ids=str)
def test_saying_nothing_is_refused_and_does_not_mean_everything(where: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="not by nothing"):
        EvictionRequest.model_validate(where).check()


@pytest.mark.parametrize(
    "body",
    [{"lru_bytes": 0}, {"lru_bytes": -1}, {"all": "yes"}, {"tier": "disk"}, {"sauce": "hf://o/r"}, {"job": 7}],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EvictionRequest.model_validate(body)


@pytest.mark.parametrize("value", ["hf_token", " padded\n", '{"aws_access_key_id": "a"}', "x" * LIMIT_VALUE_BYTES, "ü"])
def test_text_is_kept_as_it_is(value: str) -> None:
    SecretBody(value=value).check()
    assert SecretBody.model_validate_json(SecretBody(value=value).model_dump_json()).value == value


@pytest.mark.parametrize(("value", "problem"), [
    ("", "is empty"), (" \n\t", "is empty"), ("sesame\0", "is not text"),
    ('{"sesame": 1', "begins like a JSON object, and is not valid JSON"),
    ("\n{sesame}", "begins like a JSON object, and is not valid JSON"),
    ("ü" * (LIMIT_VALUE_BYTES // 2) + "x", "bytes of the secret"),  # bytes count, and not characters
])  # fmt: skip
def test_what_opens_nothing_is_refused_without_repeating_it(value: str, problem: str) -> None:
    with pytest.raises((InvalidRequestError, LimitExceededError), match=problem) as raised:
        SecretBody(value=value).check()
    assert "sesame" not in str(raised.value)
    assert "sesame" not in repr(SecretBody(value=value))


@pytest.mark.parametrize("document", ['{"value": 3}', '{"value": "sesame", "more": 1}', '{"value": ["sesame"]}', "{}"])
def test_a_wrong_body_is_refused_without_repeating_it(document: str) -> None:
    with pytest.raises(ValidationError) as raised:
        SecretBody.model_validate_json(document)
    assert "sesame" not in str(raised.value)


def test_a_name_can_be_a_variable_a_file_and_a_row() -> None:
    assert all(map(is_secret_name, ("a", "HF_TOKEN", "team-1.key", "_x", "x" * 128)))
    assert not any(map(is_secret_name, ("", ".", "..", "-x", "a/b", "a b", "a\n", "ü", "x" * 129)))


def packed_of(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content)).decode()


@pytest.mark.parametrize(
    ("opening", "part", "times", "closing"),
    [
        (b"[", b"{},", 3_000_000, b"{}]"),
        (b'["', b"a", 10_000_000, b'"]'),
        (b"", b" ", 10_000_000, b"[]"),
        (b"", b"[", 1000, b""),
        (b"[", b"0,", 1, b"0]"),
    ],
    ids=["objects", "a long string", "whitespace", "depth", "zeros"],
)
def test_a_summary_that_unpacks_to_more_than_entries__is_refused(
    opening: bytes, part: bytes, times: int, closing: bytes
) -> None:
    with pytest.raises(InvalidRequestError, match="not what an agent packs"):
        unpack(packed_of(opening + part * times + closing))


@pytest.mark.parametrize(
    "details",
    [
        {"created_at": "0001-01-01T00:00:00"},
        {"lora_adapter_config": {"a": "x" * 65536}},
        {"lora_adapter_config": {str(number): 0 for number in range(1001)}},
        {"skipped": ["x" * 4096] * 10},
    ],
    ids=["naive", "large", "wide", "many skipped"],
)
def test_details_of_a_checkpoint__have_bounds(details: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CheckpointDetails.model_validate(details)


@pytest.mark.parametrize(
    "name", ["a: is a link", "\N{GRINNING FACE}" * 1000, '"\\' * 2000], ids=["short", "wide", "escaped"]
)
@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_skipped_within_bounds__of_any_names__is_taken_and_counts_the_rest(name: str, count: int) -> None:
    kept = CheckpointDetails(skipped=skipped_within_bounds([name] * count)).skipped
    whole = [one for one in kept if one == name]
    assert kept == (whole if len(whole) == count else [*whole, f"and {count - len(whole)} more"])


def test_a_commit__is_refused_at_its_first_wrong_file() -> None:
    with pytest.raises(ValidationError) as raised:
        CommitRequest.model_validate({"files": [0] * 100})
    assert raised.value.error_count() == 1
