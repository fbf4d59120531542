"""What is counted of JSON before it is parsed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.errors import InvalidRequestError, LimitExceededError
from bdn.core.json_bounds import DEEPEST, ElementCount, check_json

JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(st.sampled_from('\\"[]{},:a\N{GRINNING FACE}')),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(st.sampled_from('\\"[]{},')), inside),
)


def elements_of(value: object) -> int:
    """Commas and opening brackets, as a writer of JSON puts them."""
    if not isinstance(value, dict | list):
        return 0
    inside = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(0, len(inside) - 1) + sum(map(elements_of, inside))


@given(JSON, st.booleans(), st.integers(1, 9))
def test_elements_are_counted_outside_strings__however_the_document_is_cut(
    value: object, is_ascii: bool, size: int
) -> None:
    body, counted = json.dumps(value, ensure_ascii=is_ascii).encode(), ElementCount("it", 10**6)
    for start in range(0, len(body), size):
        counted.add(body[start : start + size])
    counted.check_depth()
    assert counted.count == elements_of(value)


@pytest.mark.parametrize(("opening", "closing"), ["[]", ("[{" + '"":', "}]")])
def test_depth_is_bounded(opening: str, closing: str) -> None:
    levels = DEEPEST // (len(opening.replace('"":', "")))
    check_json((opening * levels + closing * levels).encode(), 10**6)
    with pytest.raises(InvalidRequestError, match="nested deeper"):
        check_json((opening * (levels + 1) + closing * (levels + 1)).encode(), 10**6)


def test_elements_are_bounded() -> None:
    check_json(b"[0,0,0]", 3)
    with pytest.raises(LimitExceededError, match="elements of the body: 4 is over the limit of 3"):
        check_json(b"[0,0,0,0]", 3)
    check_json(b'["[,{[,{[,{\\",,"]', 1)


@pytest.mark.parametrize(
    "text", [rb"\ud83d\ude00", rb"\\ud83d", rb"\\\\ud83d", rb"\uD83D\uDE00\ud7ff", b"\xed\x9f\xbf"]
)
def test_check_json__whole_unicode__is_accepted(text: bytes) -> None:
    check_json(b'{"a": ["' + text + b'"]}', 10)


@pytest.mark.parametrize(
    "text", [rb"\ud83d", rb"\ude00", rb"\ude00\ud83d", rb"\ud83d\\\ude00", rb"\ud83d\ude00\ude00", b"\xed\xa0\x80"]
)
def test_half_a_pair_is_refused__by_its_place(text: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"a\.0: invalid Unicode"):
        check_json(b'{"a": ["' + text + b'"]}', 10)
