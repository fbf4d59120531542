"""What an operator set wrongly for a library of ours is refused by the variable's name, before the library reads it."""

import subprocess
import sys
from pathlib import Path

import pytest

from bdn.core.errors import BdnError, InvalidRequestError
from bdn.core.source.uri import parse_source
from bdn.net.client import ServiceClient
from bdn.sources.environment import check_environment, forbids_hub
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import SourceContext
from bdn.store.opener import open_store

URIS = {
    "hf": "hf://o/r",
    "s3": "s3://bucket",
    "r2": "r2://account.bucket",
    "gs": "gs://bucket",
    "cw": "cw://bucket",
    "https": "https://host/file",
    "azure": "azure://account/container",
}
EACH = tuple(URIS)
WRONG = [
    *(("ALL_PROXY", value, EACH) for value in ("socks5h://127.0.0.1:1", "socks://h:1", "http://[::1", "://", "http://h:x")),
    *((name, "socks5://u:sesame@h:1", EACH) for name in ("all_proxy", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")),
    *(("HTTPS_PROXY", value, EACH) for value in ("https://proxy:3128", "ftp://proxy", "http://u:sesame@:1", "proxy:x")),
    *(("SSL_CERT_FILE", value, EACH) for value in ("/dev/null/missing/ca.pem", "/", __file__)),
    ("SSL_CERT_DIR", "/dev/null/missing", EACH),
    *(("AWS_CA_BUNDLE", value, ("s3", "r2", "cw", "gs")) for value in ("/dev/null/missing/ca.pem", __file__)),
    ("REQUESTS_CA_BUNDLE", "/dev/null/missing/ca.pem", ("s3", "r2", "cw")),
    *(("HF_ENDPOINT", value, ("hf",)) for value in ("hub.example", "http://[::1", "http://h:x", "ftp://h", "http://a b", "https://")),
    *(("AWS_ENDPOINT_URL", value, ("s3",)) for value in ("minio:9000", "https://u:sesame@", "http://h:x")),
    ("AWS_ENDPOINT_URL_S3", "minio:9000", ("s3",)),
    ("AWS_ENDPOINT_URL_STS", "sts", ("s3",)),
    *((f"BDN_GOOGLE_{name}_URL", "google", ("gs",)) for name in ("STS", "IAM", "TOKEN")),
    *(("STORAGE_EMULATOR_HOST", value, ("gs",)) for value in ("http://h:x", "a b:1", "ftp://h")),
    *(("HF_TOKEN", value, ("hf",)) for value in ("hf_\u00fc", "hf_a b", "hf_a\nb")),
    *((f"AWS_{name}", "sesame \u00fc", ("s3",)) for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")),
    *((name, "us east 1", ("s3",)) for name in ("AWS_REGION", "AWS_DEFAULT_REGION")),
    *((name, "soon", ("hf",)) for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT")),
    *((name, value, ("hf",)) for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") for value in ("1", "yes", "True", "ON")),
]  # fmt: skip
CASES = [(scheme, name, value) for name, value, schemes in WRONG for scheme in schemes]


@pytest.mark.parametrize(("scheme", "name", "value"), CASES)
async def test_source__with_a_wrong_variable_of_a_library__is_refused_by_its_name(
    scheme: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    context = SourceContext("acme", UpstreamSettings())

    with pytest.raises(InvalidRequestError) as raised:
        async with open_source(parse_source(URIS[scheme]), context) as source:
            await source.resolve()

    assert str(raised.value).startswith((f"{name}: ", f"{name}={value} "))
    assert "sesame" not in str(raised.value)
    assert not raised.value.transient


@pytest.mark.parametrize(("address", "name"), [
    ("s3://bucket/p", "AWS_CA_BUNDLE"), ("gs://bucket/p", "HTTPS_PROXY"), ("r2://account.bucket/p", "SSL_CERT_FILE"),
])  # fmt: skip
def test_store__with_a_wrong_variable_of_a_library__is_refused_by_its_name(
    address: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "socks5:///dev/null/missing")
    with pytest.raises(InvalidRequestError, match=f"^{name}: "):
        open_store(address, SourceContext("", UpstreamSettings()), exclusive=True)


@pytest.mark.parametrize(("name", "value"), [
    ("HTTPS_PROXY", "http://u:p%40ss@proxy:3128/"), ("HTTPS_PROXY", "proxy:3128"), ("ALL_PROXY", "http://[fd00::1]:3128"),
    ("ALL_PROXY", ""), ("ftp_proxy", "socks5://h:1"), ("HF_HUB_OFFLINE", "0"), ("TRANSFORMERS_OFFLINE", "false"),
    ("HF_DATASETS_OFFLINE", "1"), ("HF_ENDPOINT", "https://hub.example/"), ("STORAGE_EMULATOR_HOST", "localhost:9023"),
    ("HF_TOKEN", "hf_abc\n"), ("HF_HUB_ETAG_TIMEOUT", "10"), ("HF_HOME", "/proc/nowhere"), ("AWS_PROFILE", "missing"),
    ("AWS_CONFIG_FILE", "/dev/null/missing"), ("AWS_SHARED_CREDENTIALS_FILE", "/dev/null/missing"), ("CURL_CA_BUNDLE", "/dev/null/missing"),
    *(("NO_PROXY", value) for value in ("[::1", "10.0.0.0/8, *.corp, ,::1", "http://[bad", "h:x", "a b", "*")),
])  # fmt: skip
@pytest.mark.parametrize("uri", URIS.values())
async def test_source__with_a_variable_that_is_right_or_of_others__is_opened(
    uri: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv(name, value)

    async with open_source(parse_source(uri), SourceContext("acme", UpstreamSettings())):
        pass


def test_proxy__that_no_proxy_excepts_for_all_hosts__is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://h:1")
    monkeypatch.setenv("NO_PROXY", "localhost, *")
    check_environment("hf")


def test_hub__forbidden_by_the_variables_of_its_own_client__is_what_that_client_reads() -> None:
    script = "from huggingface_hub.constants import HF_HUB_OFFLINE; print(HF_HUB_OFFLINE)"
    for environ in (
        {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"},
        {"TRANSFORMERS_OFFLINE": "On"},
        {"HF_HUB_OFFLINE": "no"},
    ):
        done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(forbids_hub(environ) is not None)


@pytest.mark.parametrize(("name", "value"), [
    ("ALL_PROXY", "socks5://h:1"), ("HTTPS_PROXY", "http://h:x"), ("SSL_CERT_FILE", "/dev/null/missing/ca.pem"), ("SSL_CERT_DIR", "/dev/null/missing"),
])  # fmt: skip
def test_client_of_a_service__with_a_wrong_variable__is_refused_by_its_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(BdnError, match=f"^{name}: "):
        ServiceClient("https://mirror.example:8460")


@pytest.mark.parametrize("address", ["http://127.0.0.1:8460", "unix:/run/bdn/agent.sock"])
async def test_client_of_a_service_on_this_machine__with_a_wrong_variable__is_made(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://h:1")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing"))
    await ServiceClient(address).close()
