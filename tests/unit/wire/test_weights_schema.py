"""Requests for weights: both forms of truss are understood, and nothing that is not understood is accepted."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from bdn.core.errors import BdnError, InvalidMountError, InvalidRequestError, InvalidSourceError
from bdn.core.source.uri import Auth, AuthMethod, Patterns, WeightsSource, parse_source
from bdn.net.api_server import describe_validation
from bdn.wire.mirror_schema import MirrorRequestBody, WeightsSourceBody, body_from
from tests.support.network.bodies import QWEN, TRAINING_DATA, TRAINING_JOB, source

EXPECTED = (
    WeightsSource(parse_source("hf://Qwen/Qwen3-0.6B"), "/app/models/q"),
    WeightsSource(
        parse_source("s3://my-bucket/training-data"),
        "/app/data",
        Patterns(("*.safetensors",), ("*.md",)),
        Auth(AuthMethod.CUSTOM_SECRET, {"auth_secret_name": "aws_credentials"}),
    ),
)


def sources_of(body: object) -> tuple[WeightsSource, ...]:
    """As the service reads it: from JSON."""
    return MirrorRequestBody.model_validate_json(json.dumps(body)).sources()


def refusal_of(body: object) -> str:
    """What the caller is told; the request is refused."""
    try:
        sources_of(body)
    except ValidationError as error:
        return describe_validation(error.errors())
    except BdnError as error:
        return f"{error.code} {error}"
    pytest.fail("it was accepted")


def without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    return {
        name: without_nulls(value) if isinstance(value, dict) else value
        for name, value in body.items()
        if value is not None
    }


@pytest.mark.parametrize("body", [
    {"weights": [QWEN, TRAINING_DATA]}, {"weights": [without_nulls(QWEN), without_nulls(TRAINING_DATA)]},
    {"training_job": TRAINING_JOB}, {"weights": None, "training_job": TRAINING_JOB},
], ids=["with nulls", "without", "a training job", "a training job and null"])  # fmt: skip
def test_what_truss_sends_is_understood_unchanged(body: dict[str, Any]) -> None:
    assert sources_of(body) == EXPECTED


@pytest.mark.parametrize("empty", [None, []])
def test_no_weights_are_no_sources(empty: list[Any] | None) -> None:
    for body in ({"weights": empty}, {"training_job": {**TRAINING_JOB, "weights": empty}}):
        assert sources_of(body) == ()
    assert sources_of({"weights": None, "training_job": {**TRAINING_JOB, "weights": empty}}) == ()


@pytest.mark.parametrize("empty", [None, []])
def test_no_patterns_and_an_empty_list_of_patterns_restrict_nothing(empty: list[str] | None) -> None:
    (only,) = sources_of({"weights": [source(allow_patterns=empty, ignore_patterns=empty)]})
    assert only.patterns == Patterns()


EITHER = 'INVALID_REQUEST send either "weights" or "training_job"'
ONE_PLACE = (
    "auth_secret_name cannot be specified both at the top level and in auth section. Please use only one location."
)
SECRET_AUTH = {"auth_method": "CUSTOM_SECRET", "auth_secret_name": "name"}
OIDC_AUTH = {"auth_method": "AWS_OIDC", "aws_oidc_role_arn": "arn", "aws_oidc_region": "us-east-1"}


@pytest.mark.parametrize(("body", "told"), [
    ({}, EITHER),
    ({"weights": None, "training_job": None}, EITHER),
    ({"weights": [QWEN], "training_job": TRAINING_JOB}, EITHER),
    ({"training_job": None}, EITHER),
    ({"weights": [], "training_job": TRAINING_JOB}, EITHER),
    ({"training_job": {name: value for name, value in TRAINING_JOB.items() if name != "weights"}},
        "training_job.weights: Field required"),
    ({"weights": [source(ignore_pattern=["x"])]}, "weights.0.ignore_pattern: is not a known field"),
    ({"weights": [source(auth=SECRET_AUTH | {"secret": "x"})]}, "weights.0.auth.secret: is not a known field"),
    ({"weights": [source()], "wieghts": []}, "wieghts: is not a known field"),
    ({"training_job": {"weights": [source(kind="hf")]}}, "training_job.weights.0.kind: is not a known field"),
    ({"weights": [source(auth=SECRET_AUTH, auth_secret_name="name")]}, f"INVALID_REQUEST {ONE_PLACE}"),
    ({"weights": [source(source="s3://bucket", auth=OIDC_AUTH, auth_secret_name="name")]},
        "INVALID_REQUEST auth_secret_name cannot be specified together with auth"),
    ({"weights": [{"mount_location": "/m"}]}, "weights.0.source: Field required"),
    ({"weights": [{"source": "hf://o/r"}]}, "weights.0.mount_location: Field required"),
    ({"weights": [source(source=3)]}, "weights.0.source: Input should be a valid string"),
    ({"weights": [source(source="")]}, "weights.0.source: "),
    ({"weights": [source(source="hf://o/" + "r" * 5000)]}, "weights.0.source: "),
    ({"weights": [source(mount_location="")]}, "weights.0.mount_location: "),
    ({"weights": [source(allow_patterns="*.bin")]}, "weights.0.allow_patterns: Input should be a valid array"),
    ({"weights": [source(allow_patterns=[1])]}, "weights.0.allow_patterns.0: Input should be a valid string"),
    ({"weights": [source(auth={})]}, "weights.0.auth.auth_method: Field required"),
    ({"weights": [source(auth_secret_name=7)]}, "weights.0.auth_secret_name: Input should be a valid string"),
    ({"weights": source()}, "weights: Input should be a valid array"),
    ([], "the body: "),
    ("x", "the body: "),
])  # fmt: skip
def test_a_request_that_makes_no_sense_is_refused_with_its_place_and_reason(body: object, told: str) -> None:
    refusal = refusal_of(body)
    assert refusal.startswith(told) if told.endswith(": ") else refusal == told


def test_a_request_names_at_most_256_sources() -> None:
    many = [source(mount_location=f"/app/{number}") for number in range(257)]
    assert len(sources_of({"weights": many[:256]})) == 256
    assert refusal_of({"weights": many}) == "INVALID_REQUEST 257 sources are too many for one mirror; the limit is 256"


@pytest.mark.parametrize(("changes", "code"), [
    ({"source": "ftp://host/x"}, InvalidSourceError), ({"mount_location": "relative"}, InvalidMountError),
    ({"allow_patterns": ["/absolute"]}, InvalidRequestError), ({"ignore_patterns": [""]}, InvalidRequestError),
    ({"auth": {"auth_method": "AWS_OIDC", "aws_oidc_region": "r"}}, InvalidRequestError),
    ({"auth": SECRET_AUTH | {"aws_oidc_region": "r"}}, InvalidRequestError),
])  # fmt: skip
def test_what_a_field_says_is_checked(changes: dict[str, Any], code: type[BdnError]) -> None:
    with pytest.raises(code):
        sources_of({"weights": [source(**changes)]})


def test_mounts_are_normalised_and_neither_equal_nor_nested() -> None:
    (only,) = sources_of({"weights": [source(mount_location="/app//models/./x/")]})
    assert only.mount_location == "/app/models/x"
    refusal = refusal_of({"weights": [source(mount_location="/m"), source(mount_location="/m/./inner")]})
    assert refusal.startswith("INVALID_MOUNT")
    assert "is inside '/m'" in refusal


METHODS: list[tuple[str, str, dict[str, str]]] = [
    ("hf://o/r", "CUSTOM_SECRET", {"auth_secret_name": "name"}),
    ("r2://account.bucket", "CUSTOM_SECRET", {"auth_secret_name": "name"}),
    ("s3://bucket", "AWS_OIDC", {"aws_oidc_role_arn": "arn", "aws_oidc_region": "us-east-1"}),
    ("gs://bucket", "GCP_OIDC", {"gcp_oidc_service_account": "a", "gcp_oidc_workload_id_provider": "p"}),
    ("s3://bucket", "AWS_ASSUME_ROLE", {"aws_assume_role_arn": "arn", "aws_assume_role_region": "us-east-1"}),
]


@pytest.mark.parametrize(("uri", "method", "fields"), METHODS)
def test_a_method_takes_its_own_fields_and_survives_being_written_to_the_wire_and_read(
    uri: str, method: str, fields: dict[str, str]
) -> None:
    auth = Auth(AuthMethod(method), fields)
    for spelled in (method, method.lower()):
        (only,) = sources_of({"weights": [source(source=uri, auth={"auth_method": spelled, **fields})]})
        assert only.auth == auth
    for given in (
        WeightsSource(parse_source(uri), "/m", Patterns(("*.bin",), ("b/",)), auth),
        WeightsSource(parse_source(uri), "/m"),
    ):
        written = body_from(given).model_dump_json()
        assert WeightsSourceBody.model_validate_json(written).to_core() == given


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    told = refusal_of({"weights": [source(auth={"auth_method": "PASSWORD"})]})
    assert told.endswith("Supported auth methods: CUSTOM_SECRET, AWS_OIDC, GCP_OIDC, AWS_ASSUME_ROLE")


def test_the_older_spelling_of_a_secret_means_the_same() -> None:
    (older,) = sources_of({"weights": [source(auth_secret_name="name")]})
    (newer,) = sources_of({"weights": [source(auth={"auth_method": "CUSTOM_SECRET", "auth_secret_name": "name"})]})
    assert older == newer
    assert older.auth == Auth(AuthMethod.CUSTOM_SECRET, {"auth_secret_name": "name"})
