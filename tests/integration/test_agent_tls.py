"""An agent whose mirror is behind TLS, with an authority of the operator's own."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bdn.core.errors import BdnError
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import MIB, Rig, noise, staged
from tests.support.content.trees import tree
from tests.support.network.authority import Authority, new_authority
from tests.support.network.tls_face import tls_face

FILES = {"large": noise(9 * MIB + 1, 1), "small": b"small", "other": b"other"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return new_authority(tmp_path_factory.mktemp("authority"), "localhost")


@pytest.fixture
def mirror(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentMirror]:
    """One that says ``https`` of itself, on both of its ports."""
    for name in ("HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with AgentMirror(is_packed=True).running() as mirror, ExitStack() as stack:
        plain = (urlsplit(mirror.url).port or 0, mirror.data_port or 0)
        api, mirror.data_port = (stack.enter_context(tls_face(port, authority.server)) for port in plain)
        mirror.url = f"https://localhost:{api}"
        yield mirror


async def test_a_stage_is_filled_over_tls(
    mirror: AgentMirror, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificates))
    manifest = mirror.publish(FILES)
    async with Rig(mirror, tmp_path).agent() as agent:
        stage = await staged(agent, mirror, manifest)
        assert tree(Path(stage.mounts[0].path)) == FILES
        assert stage.mounts[0].bytes_from.mirror == manifest.bytes_total


async def test_a_mirror_that_nobody_vouches_for_fails_the_stage_and_says_why(
    mirror: AgentMirror, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificates))
    manifest = mirror.publish(FILES)
    async with Rig(mirror, tmp_path).agent() as agent:
        await agent.heartbeats.beat()  # this agent knows the mirror's keys, and so what a grant of it says
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("SSL_CERT_FILE", str(new_authority(other, "localhost").certificates))
    mirror.forget()
    async with Rig(mirror, tmp_path).agent() as agent:
        with pytest.raises(BdnError, match="CERTIFICATE_VERIFY_FAILED"):
            await staged(agent, mirror, manifest)
    assert not mirror.documents
    assert not mirror.requests
