"""What of a request may become part of a host name or a path of a token service."""

import pytest

from bdn.core.errors import InvalidRequestError
from bdn.sources.sign_in import Assertion, AwsRole, GoogleServiceAccount

ROLE = "arn:aws:iam::123456789012:role/weights"
NAME = "projects/1/locations/global/workloadIdentityPools/pool-1/providers/provider-1"
ASSERTION = Assertion(
    lambda audience: f"sesame for {audience}", "https://mirror.test", "v=1:org=acme:job=*:type=mirror"
)


@pytest.mark.parametrize(
    "region",
    ["us-east-1", "eu-central-2", "us-gov-west-1", "cn-northwest-1", "us-iso-east-1", "eusc-de-east-1", "mx-central-1"],
)
def test_regions_of_all_partitions_are_taken(region: str) -> None:
    assert AwsRole(ROLE, region, "s").region == region


@pytest.mark.parametrize("region", [
    "", "us-east", "us-east-1.evil", "evil/us-east-1", "us-east-1:443", "us_east-1", "-us-east-1", "us-east-1 ",
    "us-east-111", "us-east-1@evil", "us-east-1\n", "US-EAST-1", "evil.example/?",
])  # fmt: skip
def test_what_is_no_region_is_refused(region: str) -> None:
    with pytest.raises(InvalidRequestError, match="region of AWS"):
        AwsRole(ROLE, region, "s")


@pytest.mark.parametrize(
    "arn",
    [ROLE, "arn:aws-cn:iam::123456789012:role/w", "arn:aws-us-gov:iam::123456789012:role/a/b/c", f"{ROLE}+=,.@-_9"],
)
def test_roles_of_all_partitions_and_paths_are_taken(arn: str) -> None:
    role = AwsRole(arn, "us-east-1", "s")
    assert role.account == "123456789012"
    assert role.provider_arn("https://mirror.test/x") == f"{arn.partition(':role/')[0]}:oidc-provider/mirror.test/x"


@pytest.mark.parametrize("arn", [
    "", "weights", "arn:aws:iam::1:role/w", "arn:aws:sts::123456789012:role/w", f"{ROLE}*", f"{ROLE}\nx",
    f"{ROLE}/", f"x{ROLE}", f"{ROLE} ", f"{ROLE}\n", "arn:aws:iam::123456789012:user/w",
])  # fmt: skip
def test_what_is_no_role_is_refused(arn: str) -> None:
    with pytest.raises(InvalidRequestError, match="ARN of a role"):
        AwsRole(arn, "us-east-1", "s")


@pytest.mark.parametrize("prefix", ["", "//iam.googleapis.com/", "https://iam.googleapis.com/"])
def test_a_provider_is_taken_by_each_of_its_names(prefix: str) -> None:
    account = GoogleServiceAccount.of("a@p.iam.gserviceaccount.com", prefix + NAME, ASSERTION)
    assert account.audience == f"//iam.googleapis.com/{NAME}"
    assert account.token_audience == f"https://iam.googleapis.com/{NAME}"


@pytest.mark.parametrize("email", [
    "weights@project.iam.gserviceaccount.com",
    "weights@project.example.com.iam.gserviceaccount.com",
    "123-compute@developer.gserviceaccount.com",
    "project@appspot.gserviceaccount.com",
])  # fmt: skip
def test_service_accounts_of_all_kinds_are_taken(email: str) -> None:
    assert GoogleServiceAccount.of(email, NAME, ASSERTION).email == email


@pytest.mark.parametrize(
    "email", ["", "a@example.com", "a@evilgserviceaccount.com", "a/b@p.iam.gserviceaccount.com", "a@p.iam.gserviceaccount.com/x", "A@p.iam.gserviceaccount.com", "a@p.iam.gserviceaccount.com\n", "a@p.iam.gserviceaccount.com:x"]
)  # fmt: skip
def test_what_is_no_service_account_is_refused(email: str) -> None:
    with pytest.raises(InvalidRequestError, match="service account"):
        GoogleServiceAccount.of(email, NAME, ASSERTION)


@pytest.mark.parametrize("provider", ["", "provider", f"//evil.example/{NAME}", f"{NAME}?x", f"{NAME}\n"])
def test_what_is_no_provider_is_refused(provider: str) -> None:
    with pytest.raises(InvalidRequestError, match="workload identity provider"):
        GoogleServiceAccount.of("a@p.iam.gserviceaccount.com", provider, ASSERTION)


def test_no_repr_makes_or_shows_a_token() -> None:
    assert "sesame" not in repr(GoogleServiceAccount.of("a@p.iam.gserviceaccount.com", NAME, ASSERTION))
