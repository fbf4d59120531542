"""Where upstreams are, and what of a request may become part of a host name or a path of a token service."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bdn.core.errors import InvalidRequestError
from bdn.sources.settings import AZURE, CLOUDFLARE_R2, S3Credentials, UpstreamSettings, account_address, check_template
from bdn.sources.sign_in import Assertion, AwsRole, GoogleServiceAccount, Secret

ROLE = "arn:aws:iam::123456789012:role/weights"
NAME = "projects/1/locations/global/workloadIdentityPools/pool-1/providers/provider-1"
ASSERTION = Assertion(
    lambda audience: f"sesame for {audience}", "https://mirror.test", "v=1:org=acme:job=*:type=mirror"
)


def test_an_empty_environment_means_the_public_upstreams_without_credentials() -> None:
    assert UpstreamSettings.from_environment({}) == UpstreamSettings("https://huggingface.co", None, None, "us-east-1")


def test_the_ecosystem_s_variables_are_honoured() -> None:
    settings = UpstreamSettings.from_environment(
        {
            "HF_ENDPOINT": "https://hub.example/", "HF_TOKEN": "hf_ambient",
            "AWS_ENDPOINT_URL_S3": "https://s3.example/", "AWS_ENDPOINT_URL": "https://other.example",
            "AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "session",
            "AWS_DEFAULT_REGION": "eu-west-1", "SSL_CERT_FILE": "/etc/ssl/ours.pem",
        }
    )  # fmt: skip
    assert settings == UpstreamSettings(
        hf_endpoint="https://hub.example",
        hf_token="hf_ambient",
        s3_endpoint_url="https://s3.example",
        s3_region="eu-west-1",
        s3_credentials=S3Credentials("AKIA", "secret", "session", "eu-west-1"),
        sts_endpoint_url="https://other.example",
        ca_bundle="/etc/ssl/ours.pem",
    )


@pytest.mark.parametrize(("environ", "expected"), [
    ({"AWS_ENDPOINT_URL_STS": "https://sts.example/", "AWS_ENDPOINT_URL": "https://other.example"},
        {"sts_endpoint_url": "https://sts.example", "s3_endpoint_url": "https://other.example"}),
    ({"BDN_GOOGLE_STS_URL": "https://gsts.example/v1/token"}, {"google_sts_url": "https://gsts.example/v1/token"}),
    ({"BDN_GOOGLE_IAM_URL": "https://iam.example/"}, {"google_iam_url": "https://iam.example"}),
    ({"BDN_GOOGLE_TOKEN_URL": "https://oauth.example/token"}, {"google_token_url": "https://oauth.example/token"}),
    ({"GOOGLE_APPLICATION_CREDENTIALS": "/keys/own.json"}, {"gcs_key_file": "/keys/own.json"}),
    # an emulator of GCS is named as Google's own clients take it
    ({"STORAGE_EMULATOR_HOST": ""}, {"gcs_endpoint_url": "https://storage.googleapis.com"}),
    ({"STORAGE_EMULATOR_HOST": "localhost:9023"}, {"gcs_endpoint_url": "http://localhost:9023"}),
    ({"STORAGE_EMULATOR_HOST": "http://localhost:9023/"}, {"gcs_endpoint_url": "http://localhost:9023"}),
    ({"STORAGE_EMULATOR_HOST": "https://gcs.example"}, {"gcs_endpoint_url": "https://gcs.example"}),
    ({}, {"google_token_url": "https://oauth2.googleapis.com/token"}),
])  # fmt: skip
def test_what_else_may_be_elsewhere(environ: dict[str, str], expected: dict[str, str]) -> None:
    settings = UpstreamSettings.from_environment(environ)
    assert {name: getattr(settings, name) for name in expected} == expected


def test_empty_variables_and_half_a_key_pair_are_none() -> None:
    settings = UpstreamSettings.from_environment({"HF_TOKEN": "", "AWS_ENDPOINT_URL_S3": "", "AWS_ACCESS_KEY_ID": "A"})
    assert settings == UpstreamSettings()


def test_the_token_of_hf_auth_login_is_read_where_the_hub_s_own_client_reads_it(tmp_path: Path) -> None:
    places = ["home/.cache/huggingface/token", "caches/huggingface/token", "hub/token", "elsewhere"]
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(f" hf_of_{place}\r\n")
    environ = {"HOME": f"{tmp_path}/home"}
    steps = {
        "XDG_CACHE_HOME": "caches", "HF_HOME": "hub", "HF_TOKEN_PATH": "elsewhere",
    }  # fmt: skip
    found = [UpstreamSettings.from_environment(environ).hf_token]
    for name, place in steps.items():
        environ[name] = str(tmp_path / place)
        found.append(UpstreamSettings.from_environment(environ).hf_token)
    assert found == [f"hf_of_{place}" for place in places]
    script = "from huggingface_hub import get_token; print(get_token())"
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found[-1]

    assert UpstreamSettings.from_environment({**environ, "HF_TOKEN": "hf_own\n"}).hf_token == "hf_own"
    assert UpstreamSettings.from_environment({**environ, "HF_TOKEN_PATH": str(tmp_path)}).hf_token is None


def test_no_repr_shows_a_secret() -> None:
    credentials = S3Credentials("AKIASESAME", "sesame", "sesame")
    settings = UpstreamSettings(hf_token="sesame", s3_credentials=credentials)
    account = GoogleServiceAccount.of("a@p.iam.gserviceaccount.com", NAME, ASSERTION)
    shown = repr((Secret("name", "sesame"), credentials, settings, account))
    assert "sesame" not in shown.lower()
    assert "name" in shown


@pytest.mark.parametrize(("template", "without", "with_jurisdiction"), [
    (CLOUDFLARE_R2, "https://4cc0.r2.cloudflarestorage.com", "https://4cc0.eu.r2.cloudflarestorage.com"),
    ("https://{account}.{jurisdiction}.r2.test", "https://4cc0.r2.test", "https://4cc0.eu.r2.test"),
    ("https://r2.test/{account}/{jurisdiction}", "https://r2.test/4cc0/", "https://r2.test/4cc0/eu"),
    ("https://r2.test:8443", "https://r2.test:8443", "https://r2.test:8443"),
    ("http://[::1]:9000", "http://[::1]:9000", "http://[::1]:9000"),
    (AZURE, "https://4cc0.blob.core.windows.net", "https://4cc0.blob.core.windows.net"),
])  # fmt: skip
def test_placeholders_are_filled_in_and_an_absent_jurisdiction_takes_its_dot_along(
    template: str, without: str, with_jurisdiction: str
) -> None:
    assert check_template(f"{template}/") == template
    assert account_address(template, "4cc0", "") == without
    assert account_address(template, "4cc0", "eu") == with_jurisdiction


@pytest.mark.parametrize("template", [
    "", "r2.test", "ftp://r2.test", "https://", "https://r2.test?x", "https://key@r2.test",
    "https://{acount}.r2.test",
])  # fmt: skip
def test_what_does_not_become_an_address_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="must be an http or https address"):
        check_template(template)


REGIONS = [
    "us-east-1", "eu-central-2", "us-gov-west-1", "cn-northwest-1", "us-iso-east-1", "eusc-de-east-1", "mx-central-1",
]  # fmt: skip
ROLES = [ROLE, "arn:aws-cn:iam::123456789012:role/w", "arn:aws-us-gov:iam::123456789012:role/a/b/c", f"{ROLE}+=,.@-_9"]
EMAILS = [
    "weights@project.iam.gserviceaccount.com", "weights@project.example.com.iam.gserviceaccount.com",
    "123-compute@developer.gserviceaccount.com", "project@appspot.gserviceaccount.com",
]  # fmt: skip


def test_regions_roles_accounts_and_providers_of_all_kinds_are_taken() -> None:
    assert [AwsRole(ROLE, region, "s").region for region in REGIONS] == REGIONS
    for arn in ROLES:
        role = AwsRole(arn, "us-east-1", "s")
        assert role.account == "123456789012"
        assert role.provider_arn("https://mirror.test/x") == f"{arn.partition(':role/')[0]}:oidc-provider/mirror.test/x"
    assert [GoogleServiceAccount.of(email, NAME, ASSERTION).email for email in EMAILS] == EMAILS
    for prefix in ("", "//iam.googleapis.com/", "https://iam.googleapis.com/"):
        account = GoogleServiceAccount.of(EMAILS[0], prefix + NAME, ASSERTION)
        assert account.audience == f"//iam.googleapis.com/{NAME}"
        assert account.token_audience == f"https://iam.googleapis.com/{NAME}"


REFUSED: list[tuple[str, Callable[[str], object], list[str]]] = [
    ("region of AWS", lambda region: AwsRole(ROLE, region, "s"), [
        "", "us-east", "us-east-1.evil", "evil/us-east-1", "us-east-1:443", "us_east-1", "-us-east-1", "us-east-1 ",
        "us-east-111", "us-east-1@evil", "us-east-1\n", "US-EAST-1", "evil.example/?",
    ]),
    ("ARN of a role", lambda arn: AwsRole(arn, "us-east-1", "s"), [
        "", "weights", "arn:aws:iam::1:role/w", "arn:aws:sts::123456789012:role/w", f"{ROLE}*", f"{ROLE}\nx",
        f"{ROLE}/", f"x{ROLE}", f"{ROLE} ", f"{ROLE}\n", "arn:aws:iam::123456789012:user/w",
    ]),
    ("service account", lambda email: GoogleServiceAccount.of(email, NAME, ASSERTION), [
        "", "a@example.com", "a@evilgserviceaccount.com", "a/b@p.iam.gserviceaccount.com", "a@p.iam.gserviceaccount.com/x",
        "A@p.iam.gserviceaccount.com", "a@p.iam.gserviceaccount.com\n", "a@p.iam.gserviceaccount.com:x",
    ]),
    ("workload identity provider", lambda provider: GoogleServiceAccount.of(EMAILS[0], provider, ASSERTION),
        ["", "provider", f"//evil.example/{NAME}", f"{NAME}?x", f"{NAME}\n"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "make", "text"), [(*row[:2], text) for row in REFUSED for text in row[2]])
def test_what_is_none_of_these_is_refused(words: str, make: Callable[[str], object], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        make(text)
