from __future__ import annotations

from bdn.sources.credentials import S3Credentials, Secret
from bdn.sources.settings import UpstreamSettings


def test_an_empty_environment_means_the_public_upstreams_without_credentials() -> None:
    assert UpstreamSettings.from_environment({}) == UpstreamSettings("https://huggingface.co", None, None, "us-east-1")


def test_the_ecosystem_s_variables_are_honoured() -> None:
    settings = UpstreamSettings.from_environment(
        {
            "HF_ENDPOINT": "https://hub.example/",
            "HF_TOKEN": "hf_ambient",
            "AWS_ENDPOINT_URL_S3": "https://s3.example/",
            "AWS_ENDPOINT_URL": "https://other.example",
            "AWS_ACCESS_KEY_ID": "AKIA",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_SESSION_TOKEN": "session",
            "AWS_DEFAULT_REGION": "eu-west-1",
            "SSL_CERT_FILE": "/etc/ssl/ours.pem",
        }
    )
    assert settings == UpstreamSettings(
        "https://hub.example",
        "hf_ambient",
        "https://s3.example",
        "eu-west-1",
        S3Credentials("AKIA", "secret", "session", "eu-west-1"),
        "/etc/ssl/ours.pem",
    )


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
