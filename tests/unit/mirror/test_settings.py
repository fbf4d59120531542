"""What an operator can set, and where."""

from pathlib import Path

import pytest

from bdn.core.egress import PUBLIC_INTERNET, EgressPolicy
from bdn.core.errors import InvalidRequestError
from bdn.mirror.db.database import Database, database_url, place_of
from bdn.mirror.settings import MirrorSettings
from bdn.settings import NAMES, ClientSettings, FileSettings, SettingsError
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import SourceContext
from bdn.store.opener import open_store
from node_agent.settings import _SHARED as AGENTS_SHARED
from node_agent.settings import load_settings

NOBODY = SourceContext("", UpstreamSettings())


def test_the_defaults_are_the_contract_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    settings = MirrorSettings()
    assert (settings.host, settings.port, settings.data_port, settings.auth) == ("127.0.0.1", 8460, 8461, "off")
    assert settings.data_dir == tmp_path / "bdn"
    assert settings.effective_database_url == f"sqlite+aiosqlite:///{tmp_path}/bdn/mirror.sqlite"
    assert settings.effective_store == f"file://{tmp_path}/bdn/store"
    assert settings.is_embedded


def test_what_is_given_comes_before_the_environment_and_that_before_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bdn.toml").write_text('port = 1\ndata_port = 2\njobs = 3\nlimit_bytes = "2GiB"\n')
    monkeypatch.setenv("BDN_CONFIG", str(tmp_path / "bdn.toml"))
    monkeypatch.setenv("BDN_DATA_PORT", "20")
    monkeypatch.setenv("BDN_JOBS", "30")
    settings = MirrorSettings(jobs=300)
    assert (settings.port, settings.data_port, settings.jobs, settings.limit_bytes) == (1, 20, 300, 2 * 1024**3)


@pytest.mark.parametrize("content", ["not toml", None])
@pytest.mark.parametrize("settings", [MirrorSettings, ClientSettings])
def test_a_file_that_is_named_and_cannot_be_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: type[FileSettings], content: str | None
) -> None:
    if content is not None:
        (tmp_path / "bdn.toml").write_text(content)
    monkeypatch.setenv("BDN_CONFIG", str(tmp_path / "bdn.toml"))
    with pytest.raises(SettingsError, match=r"BDN_CONFIG: .*bdn\.toml cannot be read"):
        settings()


def test_commands_read_the_file_that_the_services_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bdn.toml").write_text('url = "http://mirror:1"\ntoken = "t"\njobs = 3\n[agent]\nroles = "node"\n')
    monkeypatch.setenv("BDN_CONFIG", str(tmp_path / "bdn.toml"))
    monkeypatch.setenv("BDN_TOKEN", "of-the-environment")
    settings = ClientSettings()
    assert (settings.url, settings.token) == ("http://mirror:1", "of-the-environment")
    assert settings.model_fields_set == {"url", "token"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "70000"),
        ("auth", "maybe"),
        ("limit_bytes", "much"),
        ("jobs", "0"),
        ("egress_allow", "http://x"),
        ("store_endpoint", "s3.example"),
    ],
)
def test_a_wrong_value_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"BDN_{name.upper()}", value)
    with pytest.raises(SettingsError, match=f"BDN_{name.upper()}: .*{value}"):
        MirrorSettings()


def test_the_token_is_in_no_repr() -> None:
    assert "sesame" not in repr(MirrorSettings(token="sesame"))


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket",
        "gs://bucket/x",
        "r2://account.bucket",
        "r2://bucket",
        "cw://bucket",
        "azure://account/container",
        "s3://b@x",
        "file://host/x",
        "file:relative",
        "/plain/path",
        "hf://a/b",
        "",
    ],
)
def test_a_store_that_cannot_be_opened_is_refused_by_name(address: str) -> None:
    """For a bucket there are no keys here."""
    with pytest.raises(InvalidRequestError, match="BDN_STORE"):
        open_store(address, NOBODY, exclusive=True)


def test_a_store_s_address_may_be_quoted(tmp_path: Path) -> None:
    open_store(f"file://{tmp_path}/a%20b", NOBODY, exclusive=True)
    assert (tmp_path / "a b/chunks").is_dir()


def test_nothing_beyond_the_public_internet_is_allowed_unless_it_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MirrorSettings().egress == PUBLIC_INTERNET
    monkeypatch.setenv("BDN_EGRESS_ALLOW", "minio.corp, 10.0.0.0/8")
    assert MirrorSettings().egress == EgressPolicy.parse("minio.corp 10.0.0.0/8")


def test_the_known_names_of_the_file_are_those_of_all_programs() -> None:
    of_all = {*MirrorSettings.model_fields, *ClientSettings.model_fields, *AGENTS_SHARED, "agent"}
    assert of_all == NAMES


@pytest.mark.parametrize(("content", "said"), [
    ("portt = 1", "unknown name: portt; did you mean port\\?"),
    ("BDN_LIMIT_FILES = 1", "unknown name: BDN_LIMIT_FILES; did you mean limit_files\\?"),
    ("[agents]\ncache_bytes = 1", "unknown name: agents; did you mean agent\\?"),
    ("[agent]\ncache_byte = 1", "unknown name in \\[agent\\]: cache_byte; did you mean cache_bytes\\?"),
])  # fmt: skip
def test_a_file_with_an_unknown_name_is_refused_with_the_likely_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "bdn.toml").write_text(content)
    monkeypatch.setenv("BDN_CONFIG", str(tmp_path / "bdn.toml"))
    with pytest.raises(SettingsError, match=said):
        load_settings()


def test_a_database_s_address_needs_no_driver_and_its_place_tells_no_password() -> None:
    named = {
        "postgres://u:p@h:5433/n?sslmode=require": "postgresql+asyncpg://h:5433/n",
        "postgresql://u:p@h/n": "postgresql+asyncpg://h/n",
        "postgresql+asyncpg://u:p@h/n": "postgresql+asyncpg://h/n",
        "sqlite:////var/lib/bdn.sqlite": "sqlite+aiosqlite:////var/lib/bdn.sqlite",
    }
    assert {address: place_of(database_url(address)) for address in named} == named
    assert database_url("postgres://u:p@h/n?sslmode=require").query == {"ssl": "require"}


def test_database__the_options_of_a_pooler_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="statement_cache_size"):
        Database("postgresql://h/n?statement_cache_size=100")
