"""What a secret's value may be, and that nothing repeats it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from bdn.core.errors import InvalidRequestError, LimitExceededError
from bdn.wire.access_schema import LIMIT_VALUE_BYTES, SecretBody, is_secret_name


@pytest.mark.parametrize("value", ["hf_token", " padded\n", '{"aws_access_key_id": "a"}', "x" * LIMIT_VALUE_BYTES, "ü"])
def test_text_is_kept_as_it_is(value: str) -> None:
    SecretBody(value=value).check()
    assert SecretBody.model_validate_json(SecretBody(value=value).model_dump_json()).value == value


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "is empty"),
        (" \n\t", "is empty"),
        ("sesame\0", "is not text"),
        ("sesame\ud800", "is not text"),
        ('{"sesame": 1', "begins like a JSON object and is none"),
        ("\n{sesame}", "begins like a JSON object and is none"),
    ],
)
def test_what_opens_nothing_is_refused_without_repeating_it(value: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as raised:
        SecretBody(value=value).check()
    assert "sesame" not in str(raised.value)
    assert "sesame" not in repr(SecretBody(value=value))


def test_the_limit_counts_bytes_and_not_characters() -> None:
    with pytest.raises(LimitExceededError, match="bytes of the secret"):
        SecretBody(value="ü" * (LIMIT_VALUE_BYTES // 2) + "x").check()


@pytest.mark.parametrize("document", ['{"value": 3}', '{"value": "sesame", "more": 1}', '{"value": ["sesame"]}', "{}"])
def test_a_wrong_body_is_refused_without_repeating_it(document: str) -> None:
    with pytest.raises(ValidationError) as raised:
        SecretBody.model_validate_json(document)
    assert "sesame" not in str(raised.value)


def test_a_name_can_be_a_variable_a_file_and_a_row() -> None:
    assert all(map(is_secret_name, ("a", "HF_TOKEN", "team-1.key", "_x", "x" * 128)))
    assert not any(map(is_secret_name, ("", ".", "..", "-x", "a/b", "a b", "a\n", "ü", "x" * 129)))
