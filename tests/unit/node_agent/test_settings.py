from pathlib import Path

import pytest

from bdn.settings import SettingsError
from node_agent.settings import load_settings


def test_the_defaults_are_those_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")

    settings = load_settings()

    assert settings.effective_cache_dir == Path("/data/bdn/cache")
    assert settings.effective_socket == Path("/data/bdn/agent.sock")
    assert settings.roles == ("node", "cluster")
    assert (settings.cluster, settings.port, settings.data_port) == ("default", None, 8471)
    assert (settings.exposure, settings.cache_bytes, settings.headroom_bytes) == ("auto", None, None)


def test_the_environment_sets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "BDN_DATA_DIR": "/d",
        "BDN_URL": "http://mirror:8460",
        "BDN_TOKEN": "t0ken",
        "BDN_AGENT_CACHE_DIR": "/nvme",
        "BDN_AGENT_CACHE_BYTES": "500GB",
        "BDN_AGENT_HEADROOM_BYTES": "64MiB",
        "BDN_AGENT_ROLES": "node",
        "BDN_AGENT_NODE": "n1",
        "BDN_AGENT_PORT": "8470",
        "BDN_AGENT_EXPOSURE": "symlink",
        "BDN_AGENT_GPU": "A100_40GB:8",
    }.items():
        monkeypatch.setenv(name, value)

    settings = load_settings()

    assert settings.effective_cache_dir == Path("/nvme")
    assert (settings.cache_bytes, settings.headroom_bytes) == (500 * 10**9, 64 * 2**20)
    assert (settings.roles, settings.node, settings.port) == (("node",), "n1", 8470)
    assert (settings.url, settings.token, settings.exposure) == ("http://mirror:8460", "t0ken", "symlink")
    assert settings.gpu == ("A100_40GB", 8)
    assert "t0ken" not in repr(settings)


def test_a_file_sets_what_the_environment_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "bdn.toml"
    file.write_text('url = "http://from-file"\nport = 1\n[agent]\nport = 8470\ncache_bytes = "1TB"\n')
    monkeypatch.setenv("BDN_CONFIG", str(file))
    monkeypatch.setenv("BDN_AGENT_CACHE_BYTES", "2TB")

    settings = load_settings()

    assert (settings.url, settings.port, settings.cache_bytes) == ("http://from-file", 8470, 2 * 10**12)


@pytest.mark.parametrize(("name", "value", "reason"), [
    ("BDN_AGENT_CACHE_BYTES", "lots", "not a size: 'lots'"),
    ("BDN_AGENT_ADVERTISE", "10.0.0.5:8471", "such as http://10.0.0.5:8471"),
    ("BDN_AGENT_ADVERTISE", "http://10.0.0.5:http", "Port could not be cast to integer"),
    ("BDN_AGENT_ADVERTISE", "http://[fd00::5:8471", "Invalid IPv6 URL"),
    ("BDN_AGENT_PORT", "8471/tcp", "valid integer"),
    ("BDN_URL", "tcp://10.0.0.1:8460", "such as http://mirror:8460"),
    ("BDN_URL", "http://mirror:http", "Port could not be cast to integer"),
    ("BDN_AGENT_ROLES", "node,king", "'node', 'cluster' or 'job'"),
    ("BDN_AGENT_ROLES", "cluster,job", "job needs node"),
    ("BDN_AGENT_JOB_LAUNCHER", "lxc", "'podman', 'docker' or 'bwrap'"),
    ("BDN_AGENT_JOB_SLOTS", "-1", "greater than or equal to 0"),
    ("BDN_AGENT_GPU", "8", "such as H200:8"),
    ("BDN_AGENT_GPU", "h200:8", "such as H200:8"),
    ("BDN_AGENT_ROLES", "", "at least 1 item"),
    ("BDN_AGENT_EXPOSURE", "fuse", "'auto', 'bind', 'symlink' or 'none'"),
    ("BDN_AUTH", "maybe", "'off' or 'token'"),
    ("BDN_AGENT_HOST", "0.0.0.0", "set BDN_AUTH=token"),
    ("BDN_AGENT_ADVERTISE", "http://10.0.0.5:8471", "set BDN_AUTH=token"),
    ("BDN_AGENT_TLS", "always", "'optional' or 'require'"),
])  # fmt: skip
def test_a_bad_value_is_refused_with_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(SettingsError) as caught:
        load_settings()

    assert str(caught.value).startswith(f"{name}: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize("content", ["[agent]\ncach_bytes = 1\n", "agent = 1\n", "not toml", None])
def test_a_config_file_that_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "bdn.toml"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("BDN_CONFIG", str(file))

    with pytest.raises(SettingsError, match="BDN_CONFIG: "):
        load_settings()


@pytest.mark.parametrize(("given", "address"), [
    ({}, "http://127.0.0.1:8471"),  # everything on one machine
    ({"url": "http://mirror.example:8460"}, None),
    ({"url": "http://mirror.example:8460", "advertise": "http://10.0.0.5:1", "auth": "token"}, "http://10.0.0.5:1"),
    ({"url": "http://mirror.example:8460", "host": "10.0.0.5", "auth": "token"}, "http://10.0.0.5:8471"),
    ({"host": "fd00::5", "auth": "token"}, "http://[fd00::5]:8471"),
    ({"host": "fd00::5", "auth": "token", "tls_cert": "/tls.crt", "tls_key": "/tls.key"}, "https://[fd00::5]:8471"),
    ({"tls_cert": "/tls.crt", "tls_key": "/tls.key"}, "https://127.0.0.1:8471"),
])  # fmt: skip
def test_peers_are_told_an_address_only_if_it_leads_them_here(given: dict[str, str], address: str | None) -> None:
    assert load_settings(**given).advertised(8471) == address


AWAY = {"url": "https://mirror.example:8460", "host": "10.0.0.5", "auth": "token"}
SHOWN = {"tls_cert": "/tls.crt", "tls_key": "/tls.key"}


@pytest.mark.parametrize(("given", "said"), [
    (AWAY | {"tls": "require"}, "BDN_AGENT_TLS: require needs BDN_AGENT_TLS_CERT and BDN_AGENT_TLS_KEY"),
    (AWAY | SHOWN | {"tls": "require", "url": "http://mirror.example:8460"}, "BDN_URL: .* which BDN_AGENT_TLS=require refuses"),
    (AWAY | SHOWN | {"advertise": "http://10.0.0.5:8471"}, "BDN_AGENT_ADVERTISE: .* with BDN_AGENT_TLS_CERT the data plane speaks TLS"),
    (AWAY | SHOWN | {"advertise": "HTTP://10.0.0.5:8471"}, "BDN_AGENT_ADVERTISE: .* with BDN_AGENT_TLS_CERT the data plane speaks TLS"),
])  # fmt: skip
def test_what_would_go_in_the_clear_though_tls_is_required_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_settings(**given)


@pytest.mark.parametrize("given", [
    AWAY | SHOWN | {"tls": "require"},
    {"tls": "require"},  # all of it on this machine
    AWAY | {"url": "http://mirror.example:8460"},
    AWAY | {"advertise": "https://behind-a-proxy:8471"},
])  # fmt: skip
def test_tls_may_be_required_and_may_be_left_out(given: dict[str, str]) -> None:
    load_settings(**given)
