"""The warning of a cache on the kubelet's disk."""

import logging
from pathlib import Path

import pytest

from node_agent.cache.kubelet_disk import kubelet_place, warn_of_kubelet
from node_agent.settings import load_settings
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig


@pytest.mark.parametrize(("headroom", "warns"), [
    ({}, True),  # 5 % unless told otherwise
    ({"headroom_percent": 14}, True),
    ({"headroom_percent": 15}, False),
    ({"headroom_percent": 20}, False),
    ({"headroom_bytes": 0}, True),
    ({"headroom_bytes": 1 << 60}, False),
])  # fmt: skip
def test_cache_on_the_kubelets_disk__warns_below_15_percent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, headroom: dict[str, int], warns: bool
) -> None:
    kubelet = tmp_path / "kubelet"
    kubelet.mkdir()
    warn_of_kubelet(load_settings(**headroom), tmp_path, kubelet)
    assert ["BDN_AGENT_HEADROOM_PERCENT=20" in line for line in caplog.messages] == [True] * warns


def test_cache_on_another_disk__and_no_kubelet__warn_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Path("/proc/self/status")
    assert other.stat().st_dev != tmp_path.stat().st_dev
    warn_of_kubelet(load_settings(), tmp_path, other)
    warn_of_kubelet(load_settings(), tmp_path, tmp_path / "none")
    assert caplog.messages == []


def test_kubelets_directory__is_not_visible_in_a_pod__so_a_file_of_it_stands_for_it() -> None:
    assert kubelet_place({}) == Path("/var/lib/kubelet")
    assert kubelet_place({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}) == Path("/etc/hosts")


async def test_agent__on_the_kubelets_disk__warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("node_agent.app.kubelet_place", lambda: tmp_path)
    with AgentMirror().running() as mirror, caplog.at_level(logging.WARNING):
        async with Rig(mirror, tmp_path, {"headroom_bytes": None}).agent():
            pass
        async with Rig(mirror, tmp_path, {"headroom_bytes": None, "headroom_percent": 20}).agent():
            pass
    assert len([line for line in caplog.messages if "kubelet" in line]) == 1
