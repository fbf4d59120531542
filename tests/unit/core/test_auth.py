"""With whose credentials a source is read: which fields belong to which method, and which method fits which scheme."""

import pytest

from bdn.core.errors import InvalidRequestError
from bdn.core.source.uri import FITTING_SCHEMES, REQUIRED_FIELDS, Auth, AuthMethod, WeightsSource, parse_source

# Written out again, not taken from the code: this is the contract.
FIELDS = {
    "CUSTOM_SECRET": ["auth_secret_name"],
    "AWS_OIDC": ["aws_oidc_role_arn", "aws_oidc_region"],
    "GCP_OIDC": ["gcp_oidc_service_account", "gcp_oidc_workload_id_provider"],
    "AWS_ASSUME_ROLE": ["aws_assume_role_arn", "aws_assume_role_region"],
}
SCHEMES = {"CUSTOM_SECRET": {"hf", "s3", "gs", "r2"}, "AWS_OIDC": {"s3"}, "GCP_OIDC": {"gs"}, "AWS_ASSUME_ROLE": {"s3"}}
SOURCES = {"hf": "hf://o/r", "s3": "s3://bucket", "gs": "gs://bucket", "r2": "r2://account.bucket"}
METHODS = sorted(FIELDS)


def auth_of(method: str) -> Auth:
    return Auth(AuthMethod(method), {name: f"value of {name}" for name in FIELDS[method]})


def test_the_methods_and_their_fields_are_those_of_truss() -> None:
    assert {str(method): list(names) for method, names in REQUIRED_FIELDS.items()} == FIELDS
    assert {str(method): set(schemes) for method, schemes in FITTING_SCHEMES.items()} == SCHEMES


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_exactly_its_fields_and_another_one_is_named_without_its_value(method: str) -> None:
    complete, names = auth_of(method).fields, ", ".join(FIELDS[method])
    missing = "must be provided when auth_method is"
    table: list[tuple[dict[str, str], str]] = [
        ({}, f"{names} {missing} {method}"),
        *(({other: complete[other] for other in complete if other != name}, f"{name} {missing} {method}") for name in complete),
        *((complete | {name: ""}, f"{name} {missing} {method}") for name in complete),
        *(
            (complete | {name: "hunter2"}, f"{name} cannot be specified when auth_method is {method}")
            for name in ("aws_region", *(name for other in METHODS for name in FIELDS[other] if other != method))
        ),
    ]  # fmt: skip
    for fields, message in table:
        with pytest.raises(InvalidRequestError) as caught:
            Auth(AuthMethod(method), fields)
        assert str(caught.value) == message


@pytest.mark.parametrize("scheme", sorted(SOURCES))
@pytest.mark.parametrize("method", METHODS)
def test_a_method_opens_only_the_schemes_that_it_fits(method: str, scheme: str) -> None:
    auth, source = auth_of(method), parse_source(SOURCES[scheme])
    if scheme in SCHEMES[method]:
        assert WeightsSource(source, "/m", auth=auth).auth is auth
    else:
        with pytest.raises(InvalidRequestError) as caught:
            WeightsSource(source, "/m", auth=auth)
        assert str(caught.value) == f"auth_method {method} does not fit {scheme}:// sources"


@pytest.mark.parametrize("scheme", sorted(SOURCES))
def test_every_scheme_can_be_read_anonymously(scheme: str) -> None:
    assert WeightsSource(parse_source(SOURCES[scheme]), "/m").auth is None


def test_only_a_custom_secret_has_a_name_to_resolve() -> None:
    names = {method: auth_of(method).secret_name for method in METHODS}
    assert names == dict.fromkeys(METHODS) | {"CUSTOM_SECRET": "value of auth_secret_name"}
