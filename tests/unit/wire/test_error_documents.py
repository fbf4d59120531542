"""Errors as documents: every error of the tree survives the way to another program, and no document holds a value."""

import importlib
import json
import pkgutil
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import bdn
from bdn.core import errors
from bdn.core.chunk import Digest, digest_of
from bdn.core.errors import BdnError, InternalError, StoreUnavailableError
from bdn.net.api_server import describe_validation
from bdn.wire.mirror_schema import MirrorRequestBody
from bdn.wire.shapes import (
    ErrorBody,
    ErrorDocument,
    ReportedError,
    body_of,
    by_class,
    document_of,
    error_from,
    status_of,
)
from bdn.wire.stage_schema import StageRequest
from tests.support.network.bodies import source
from tests.support.network.hypothesis import BRIEFLY

FACTS: dict[object, Any] = {
    str: 'a fact with "quotes", ü and\nlines', int: 4711, int | None: 17, bool: True, tuple[str, ...]: ("one", "two"),
    float | None: 2.5, str | None: "maybe", frozenset[Digest]: frozenset([digest_of(b"1")]),
}  # fmt: skip
GROUPS = {errors.CallerError, errors.UpstreamError, errors.ServiceError}  # never raised themselves
# Written out again, not taken from the code: what users know does not change.
STATUSES = {
    "INVALID_REQUEST": 422, "INVALID_SOURCE": 422, "INVALID_MOUNT": 422, "AUTH_REQUIRED": 422, "SECRET_NOT_FOUND": 422,
    "SECRET_MALFORMED": 422, "NO_FILES_MATCHED": 422, "EGRESS_REFUSED": 422, "LIMIT_EXCEEDED": 413, "NOT_FOUND": 404,
    "UNAUTHENTICATED": 401, "FOREIGN_REQUEST": 403, "GRANT_INVALID": 403, "GRANT_EXPIRED": 403, "IN_USE": 409, "CANCELED": 409,
    "NOT_SUPPORTED": 400,
    "SOURCE_NOT_FOUND": 502, "REVISION_NOT_FOUND": 502, "GATED_SOURCE": 502, "SOURCE_ARCHIVED": 502, "SOURCE_CHANGED": 502, "UPSTREAM_UNAVAILABLE": 502,
    "UPSTREAM_RATE_LIMITED": 502, "CHECKSUM_MISMATCH": 502, "STORE_UNAVAILABLE": 503, "CACHE_TOO_SMALL": 507, "CACHE_FULL": 507,
    "NO_ROOM": 507, "DISK_FAILED": 503, "MOUNT_FAILED": 503, "INTERNAL": 500,
    "CHUNKS_MISSING": 409, "PUSH_GIVEN_UP": 422, "QUOTA_EXCEEDED": 507, "SCRATCH_FULL": 507,
    "CACHE_AFFINITY": 409, "CACHE_NOT_SHARED": 409, "CACHE_OVER_QUOTA": 507,
}  # fmt: skip


def every_error() -> list[type[BdnError]]:
    """Every class of the tree, in whatever module of ours it stands."""
    for module in pkgutil.walk_packages(bdn.__path__, "bdn."):
        if module.name.split(".")[1] in ("core", "wire", "transfer", "store"):
            importlib.import_module(module.name)
    found, todo = list[type[BdnError]](), [BdnError]
    while todo:
        for kind in todo.pop().__subclasses__():
            todo.append(kind)
            if kind.__module__.startswith("bdn.") and kind not in GROUPS and kind is not ReportedError:
                found.append(kind)
    return sorted(set(found), key=lambda kind: kind.__name__)


def example_of(kind: type[BdnError]) -> BdnError:
    """One of this kind, with a fact for every field."""
    types = get_type_hints(kind)
    return kind(*[FACTS[types[field.name]] for field in fields(kind)])


EXAMPLES = [example_of(kind) for kind in every_error()]
EACH_ERROR = pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)


def test_every_code_of_the_contract_is_tried_here() -> None:
    assert {error.code for error in EXAMPLES} == set(STATUSES)


@EACH_ERROR
def test_an_error_survives_the_way_to_another_program(error: BdnError) -> None:
    document = document_of(error)
    body = {"code": error.code, "message": str(error), "retryable": error.transient, "details": error.details()}
    assert document == {"error": body}
    assert body_of(error) == ErrorDocument.model_validate(document).error
    assert status_of(error) == STATUSES[error.code]

    reported = error_from(status_of(error), json.dumps(document).encode())
    assert isinstance(reported, ReportedError)
    assert (reported.code, str(reported), reported.transient) == (error.code, str(error), error.transient)
    assert document_of(reported) == document  # and the way to a third
    assert status_of(reported) == status_of(error)

    caught = by_class(reported)
    assert document_of(caught) == document
    assert (caught.message, caught.retryable) == (str(error), error.transient)
    if type(error).__module__ == "bdn.core.errors":
        assert type(caught) is type(error)
        assert {name: getattr(caught, name) for name in vars(error)} == vars(error)


def test_a_reported_error_of_a_newer_version_stays_a_reported_error() -> None:
    reported = ReportedError(ErrorBody(code="NEWER", message="newer", retryable=True))
    assert by_class(reported) is reported


def test_a_reported_error_does_not_change_its_kin() -> None:
    reported = error_from(507, json.dumps(document_of(errors.CacheFullError(1, 2, 3, 4))).encode())
    assert (reported.code, reported.transient) == ("CACHE_FULL", True)
    assert (ReportedError.code, ReportedError.transient, BdnError.code) == ("INTERNAL", False, "INTERNAL")


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>", b"{}", b"[]", b"null", b'{"error": "x"}', b'{"error": {"code": "X"}}', b"\xff\xfe", b"{" * 10_000],
)
def test_an_answer_that_reports_no_error_of_ours_is_an_internal_one(content: bytes) -> None:
    error = error_from(500, content)
    assert isinstance(error, InternalError)
    assert "unexpected answer 500" in str(error)
    assert len(str(error)) < 1000


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_gateways_own_answer_may_pass(status: int) -> None:
    error = error_from(status, b"<html>bad gateway</html>")
    assert isinstance(error, StoreUnavailableError)
    assert f"a gateway answered {status}" in str(error)


def described(kind: type[MirrorRequestBody | StageRequest], body: object) -> str:
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(body)
    return describe_validation(raised.value.errors())


SECRET = "hf_AbCdEf0123456789"
LEAKS: list[tuple[type[MirrorRequestBody | StageRequest], Any]] = [
    (MirrorRequestBody, {"weights": [source(token=SECRET)]}),
    (MirrorRequestBody, {"weights": [source(auth=SECRET)]}),
    (MirrorRequestBody, {"weights": [source(auth={"auth_method": "CUSTOM_SECRET", "auth_secret": SECRET})]}),
    (MirrorRequestBody, {"weights": [source(auth={"auth_method": [SECRET]})]}),
    (MirrorRequestBody, {"weights": [source(auth_secret_name={"value": SECRET})]}),
    (MirrorRequestBody, {"weights": [source(auth_secret_name=[SECRET])]}),
    (MirrorRequestBody, {"weights": [source(allow_patterns=SECRET)]}),
    (MirrorRequestBody, {"weights": [source(mount_location="/" + SECRET * 1000)]}),
    (StageRequest, {"job_id": "job", "grant": [SECRET]}),
    (StageRequest, {"job_id": "job", "grant": SECRET, "ttl_seconds": SECRET, "wait": SECRET}),
    (StageRequest, {"job_id": SECRET * 100, "grant": SECRET}),
    (StageRequest, {"job_id": "job", "grant": SECRET, "granted": SECRET}),
]


@pytest.mark.parametrize(("kind", "body"), LEAKS)
def test_a_refusal_of_a_form_never_repeats_a_value(kind: type[MirrorRequestBody | StageRequest], body: object) -> None:
    text = described(kind, body)
    assert SECRET not in text
    assert text


NAMES = st.sampled_from(
    ["weights", "training_job", "source", "auth", "auth_method", "auth_secret_name", "allow_patterns", "x"]
)
BODIES: st.SearchStrategy[object] = st.recursive(
    st.just(SECRET) | st.none() | st.booleans() | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@BRIEFLY
@given(body=BODIES)
def test_no_body_makes_a_refusal_that_repeats_a_value(body: object) -> None:
    text = ""
    try:
        MirrorRequestBody.model_validate(body)
    except ValidationError as error:
        text = describe_validation(error.errors())
    assert SECRET not in text


def test_every_problem_is_named_in_one_line() -> None:
    text = described(MirrorRequestBody, {"weights": [{"sauce": "x"}]})
    assert text == (
        "weights.0.source: Field required; weights.0.mount_location: Field required; weights.0.sauce: is not a known field"
    )
