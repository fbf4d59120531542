"""Each setting of both programs with a wrong value, and with what Kubernetes sets for a Service of its name."""

import logging
from typing import Final

import pytest

from bdn.mirror.settings import MirrorSettings
from bdn.settings import ClientSettings, FileSettings, SettingsError, service_links, warn_of_service_links
from node_agent.csi.settings import CsiSettings
from node_agent.settings import AgentSettings

PROGRAMS: Final = (MirrorSettings, AgentSettings, ClientSettings, CsiSettings)
LINK: Final = "tcp://10.43.0.1:8460"
# Any text is one: paths, names, and addresses that only the library behind them can judge.
FREE: Final = {
    *("BDN_KUBERNETES", "BDN_AGENT_TOKEN_FILE"),
    *(f"BDN_{name}" for name in ("DATABASE_URL", "STORE", "STORE_SECRET", "HOST")),
    *("BDN_TOKEN", "BDN_SECRETS_KEY", "BDN_DATA_DIR", "BDN_SECRETS_DIR", "BDN_TLS_CERT", "BDN_TLS_KEY", "BDN_TLS_CA"),
    *("BDN_IDENTITY_KEY_FILE", "BDN_GRANT_KEY_FILE", "BDN_AGENT_HOST", "BDN_AGENT_SOCKET", "BDN_AGENT_NODE", "BDN_CSI_NODE"),
    *(f"BDN_AGENT_{name}" for name in ("CLUSTER", "CACHE_DIR", "SCRATCH_DIR", "VOLUME_ROOT", "MOUNTS_DIR", "TLS_CERT", "TLS_KEY")),
}  # fmt: skip
SETTINGS: Final = [(program, program.variable(name), name) for program in PROGRAMS for name in program.model_fields]
JUDGED: Final = [row for row in SETTINGS if row[1] not in FREE]


@pytest.mark.parametrize(("program", "variable", "name"), JUDGED, ids=[f"{row[0].__name__}-{row[1]}" for row in JUDGED])
def test_setting__with_a_wrong_value__error_names_variable_form_and_value(
    program: type[FileSettings], variable: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "some:nonsense")

    with pytest.raises(SettingsError) as raised:
        program()

    text = str(raised.value)
    assert text.startswith(f"{variable}: ")
    assert text.endswith("(it is 'some:nonsense')") or not program.model_fields[name].repr
    assert "\n" not in text


@pytest.mark.parametrize("value", ["t\u00f6ken", "sesame open", "sesame\n"])
@pytest.mark.parametrize("program", [program for program in PROGRAMS if "token" in program.model_fields])
def test_token__that_no_header_can_hold__is_refused_without_its_value(
    program: type[FileSettings], value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BDN_TOKEN", value)
    with pytest.raises(SettingsError, match=r"^BDN_TOKEN: must be printable ASCII without spaces") as raised:
        program()
    assert value.strip() not in str(raised.value)


def test_settings_that_any_text_fits_are_the_only_ones_that_are_not_judged() -> None:
    assert {variable for _, variable, _ in SETTINGS} > FREE


@pytest.mark.parametrize(("program", "variable"), [row[:2] for row in SETTINGS if row[1].endswith("_PORT")])
def test_setting__of_the_name_of_a_service_of_kubernetes__is_ignored(
    program: type[FileSettings], variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = program().model_dump()
    for name, value in {
        variable: LINK,
        f"{variable}_8460_TCP": LINK,
        f"{variable}_8460_TCP_PROTO": "tcp",
        f"{variable}_8460_TCP_PORT": "8460",
        f"{variable}_8460_TCP_ADDR": "10.43.0.1",
        f"{variable.removesuffix('PORT')}SERVICE_HOST": "10.43.0.1",
        f"{variable.removesuffix('PORT')}SERVICE_PORT": "8460",
    }.items():
        monkeypatch.setenv(name, value)

    assert program().model_dump() == before
    with caplog.at_level(logging.WARNING):
        warn_of_service_links()
    (line,) = caplog.messages
    assert f"{variable}={LINK}" in line
    assert "enableServiceLinks: false" in line


@pytest.mark.parametrize("value", ["udp://10.43.0.1:53", "tcp://[fd00::1]:8460", "sctp://10.43.0.1:1"])
def test_service_link__of_each_protocol_and_family__is_found(value: str) -> None:
    assert service_links({"BDN_PORT": value, "BDN_AGENT_PORT": value}) == ["BDN_AGENT_PORT", "BDN_PORT"]


@pytest.mark.parametrize(
    "environ", [{"BDN_PORT": "8460"}, {"BDN_PORT": "http://mirror:8460"}, {"BDN_URL": LINK}, {"OTHER_PORT": LINK}, {}]
)
def test_service_link__of_what_kubernetes_does_not_set__is_none(environ: dict[str, str]) -> None:
    """``BDN_URL=tcp://…`` is a mistake of an operator, and refused: the default in its place would be another mirror."""
    assert service_links(environ) == []
