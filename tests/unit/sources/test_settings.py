import pytest

from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import S3Credentials, Secret


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


def test_token_services_stand_where_the_operator_says() -> None:
    settings = UpstreamSettings.from_environment(
        {
            "AWS_ENDPOINT_URL_STS": "https://sts.example/",
            "AWS_ENDPOINT_URL": "https://other.example",
            "BDN_GOOGLE_STS_URL": "https://gsts.example/v1/token",
            "BDN_GOOGLE_IAM_URL": "https://iam.example/",
        }
    )
    assert settings.sts_endpoint_url == "https://sts.example"
    assert settings.google_sts_url == "https://gsts.example/v1/token"
    assert settings.google_iam_url == "https://iam.example"


@pytest.mark.parametrize(("host", "address"), [
    ("", "https://storage.googleapis.com"),
    ("localhost:9023", "http://localhost:9023"),
    ("http://localhost:9023/", "http://localhost:9023"),
    ("https://gcs.example", "https://gcs.example"),
])  # fmt: skip
def test_an_emulator_of_gcs_is_named_as_google_s_own_clients_take_it(host: str, address: str) -> None:
    settings = UpstreamSettings.from_environment({"STORAGE_EMULATOR_HOST": host})
    assert settings.gcs_endpoint_url == address


def test_a_service_account_s_key_file_and_token_endpoint_come_from_the_environment() -> None:
    settings = UpstreamSettings.from_environment(
        {"GOOGLE_APPLICATION_CREDENTIALS": "/keys/own.json", "BDN_GOOGLE_TOKEN_URL": "https://oauth.example/token"}
    )
    assert (settings.gcs_key_file, settings.google_token_url) == ("/keys/own.json", "https://oauth.example/token")
    assert UpstreamSettings().google_token_url == "https://oauth2.googleapis.com/token"


def test_empty_variables_and_half_a_key_pair_are_none() -> None:
    settings = UpstreamSettings.from_environment({"HF_TOKEN": "", "AWS_ENDPOINT_URL_S3": "", "AWS_ACCESS_KEY_ID": "A"})
    assert settings == UpstreamSettings()


def test_no_repr_shows_a_secret() -> None:
    credentials = S3Credentials("AKIASESAME", "sesame", "sesame")
    shown = repr(
        (Secret("name", "sesame"), credentials, UpstreamSettings(hf_token="sesame", s3_credentials=credentials))
    )
    assert "sesame" not in shown.lower()
    assert "name" in shown
