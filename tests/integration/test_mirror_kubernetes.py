"""A mirror that trusts a Kubernetes cluster: from a pod's token to the files on its node, with real servers."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest

from bdn.local.services import RunningMirror, running_mirror
from bdn.mirror.settings import MirrorSettings
from bdn.net.api_clients import MirrorClient
from bdn.wire.heartbeat_schema import Heartbeat
from bdn.wire.mirror_schema import Mirror, MirrorRequestBody
from bdn.wire.shapes import ReportedError
from node_agent.app import Agent, open_agent
from node_agent.settings import load_settings
from tests.doubles.hub import Hub
from tests.doubles.kubernetes import Issuer, write_clusters
from tests.support.mirror.service import prepare_database, source
from tests.support.network.authority import new_authority
from tests.support.waiting import LONGEST_SECONDS

pytest_plugins = ("tests.support.mirror.fixtures",)
FILES: Final = {"config.json": b"{}", "model.bin": b"weights" * 1000}
OPERATOR: Final = "the-operator-of-the-settings"
NAMESPACES: Final = '[namespaces.research]\norganisation = "acme"\nteam = "vision"\n'
BODY: Final = MirrorRequestBody.model_validate({"weights": [source("hf://org/model")]})


@pytest.fixture
def issuer(tmp_path: Path) -> Iterator[Issuer]:
    """As an API server: with an authority of its own, and closed to callers without a token."""
    with Issuer(tls=new_authority(tmp_path, "localhost").server) as issuer:
        issuer.needs = "the-mirrors-own-service-account"
        yield issuer


@asynccontextmanager
async def trusting(issuer: Issuer, folder: Path, **settings: Any) -> AsyncIterator[RunningMirror]:
    token = folder / "own-token"
    token.write_text(issuer.needs or "")
    lines = issuer.cluster(
        agents="bdn/agent", organisation="acme", keys_ca=str(folder / "authority.pem"), keys_token_file=str(token)
    )
    clusters = write_clusters(folder / "kubernetes.toml", gpu=lines + NAMESPACES)
    await asyncio.to_thread(prepare_database, folder / "mirror")
    given = MirrorSettings(
        data_dir=folder / "mirror", port=0, data_port=0, auth="token", token=OPERATOR, kubernetes=clusters, **settings
    )
    async with running_mirror(given) as mirror:
        yield mirror


@asynccontextmanager
async def agent_of(mirror: RunningMirror, folder: Path, token: str) -> AsyncIterator[Agent]:
    file = folder / "agent-token"
    file.write_text(token)
    given = {"data_dir": folder / "agent", "data_port": 0, "exposure": "none", "headroom_bytes": 0, "cluster": "gpu"}
    async with open_agent(load_settings(url=mirror.url, auth="token", token_file=file, **given)) as agent:
        yield agent


async def mirrored(mirror: RunningMirror, token: str) -> Mirror:
    async with MirrorClient(mirror.url, token) as client:
        begun = await client.request(BODY)
        done = await client.mirror(begun.id, LONGEST_SECONDS)
        assert done.status == "READY", done.error
        return done


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


async def test_pod__with_its_own_token__has_the_files_on_its_node(
    upstreams: None, hub: Hub, issuer: Issuer, tmp_path: Path
) -> None:
    hub.repo("org/model").commit(FILES)
    async with trusting(issuer, tmp_path) as mirror, agent_of(mirror, tmp_path, issuer.token("bdn", "agent")) as agent:
        done = await mirrored(mirror, issuer.token("research"))
        assert done.grant is not None
        stage = await agent.stages.start("research/trainer-0/weights", done.grant)
        ended = await agent.stages.finish(stage.record.id)
        (mount,) = ended.mounts
        assert await asyncio.to_thread(contents, Path(mount.path)) == FILES

        equal = await mirrored(mirror, issuer.token("research", "another-account"))
        assert equal.grant is not None
        async with MirrorClient(mirror.url, issuer.token("lab")) as other:
            with pytest.raises(ReportedError) as raised:
                await other.mirror(done.id)
            assert raised.value.code == "NOT_FOUND"
        async with MirrorClient(mirror.url, OPERATOR) as operator:
            async with asyncio.timeout(LONGEST_SECONDS):
                while not (seen := (await operator.agents()).items):  # noqa: ASYNC110 - the next heartbeat brings it
                    await asyncio.sleep(0.05)
            assert [(one.cluster, one.node) for one in seen] == [("gpu", agent.settings.node)]


async def test_agent__whose_token_was_replaced__uses_the_new_one(
    upstreams: None, issuer: Issuer, tmp_path: Path
) -> None:
    async with trusting(issuer, tmp_path) as mirror, agent_of(mirror, tmp_path, issuer.token("bdn", "agent")) as agent:
        file = agent.settings.token_file
        assert file is not None
        await agent.client.heartbeat(_beat(agent))
        file.write_text(issuer.token("bdn", "agent", exp=1))
        with pytest.raises(ReportedError, match="expired"):
            await agent.client.heartbeat(_beat(agent))
        file.write_text(issuer.token("bdn", "agent"))
        await agent.client.heartbeat(_beat(agent))
        with pytest.raises(ReportedError, match="limited to agents of cluster 'gpu'"):
            await agent.client.heartbeat(_beat(agent).model_copy(update={"cluster": "other"}))


def _beat(agent: Agent) -> Heartbeat:
    return Heartbeat(
        node="another",
        cluster=agent.settings.cluster,
        boot_id="b",
        roles=["node"],
        advertise=None,
        version="1",
        tiers={},
    )


async def test_mirror__whose_issuer_is_away_at_the_start__serves_its_own_tokens_and_says_so_to_pods(
    upstreams: None, tmp_path: Path
) -> None:
    await asyncio.to_thread(prepare_database, tmp_path / "mirror")
    with Issuer() as gone:
        url = gone.keys_url
    lines = f'issuer = "{gone.issuer}"\naudience = "bdn"\nkeys = "{url}"\norganisation = "acme"\n'
    (tmp_path / "kubernetes.toml").write_text(f"[clusters.gpu]\n{lines}")
    settings = MirrorSettings(
        data_dir=tmp_path / "mirror", port=0, data_port=0, auth="token", token=OPERATOR,
        kubernetes=tmp_path / "kubernetes.toml",
    )  # fmt: skip
    async with running_mirror(settings) as mirror, httpx2.AsyncClient(base_url=mirror.url, trust_env=False) as http:
        own = await http.get("/mirror", headers={"Authorization": f"Bearer {OPERATOR}"})
        assert own.status_code == 200
        pods = await http.get(f"/mirror/mir_{'0' * 24}", headers={"Authorization": f"Bearer {gone.token()}"})
        error = pods.json()["error"]
        assert (pods.status_code, error["code"], error["retryable"]) == (503, "STORE_UNAVAILABLE", True)
        assert "Kubernetes cluster 'gpu'" in error["message"]


async def test_hostile_tokens__are_refused_and_the_mirror_goes_on(
    upstreams: None, issuer: Issuer, tmp_path: Path
) -> None:
    good = issuer.token()
    async with trusting(issuer, tmp_path) as mirror, httpx2.AsyncClient(base_url=mirror.url, trust_env=False) as http:
        body = BODY.model_dump(mode="json", exclude_none=True)
        head, claims, signature = good.split(".")
        for token in (
            "a.b.c", "..", f"{head}.{claims}.", f"{head}.{claims}.{signature[:-4]}AAAA", f"{head}..{signature}",
            f"{good}.{good}", "W" * 30_000 + ".W.W", f"{good}{'A' * 20_000}", "\u00e9.\u00e9.\u00e9",
        ):  # fmt: skip
            header = {b"Authorization": f"Bearer {token}".encode("latin-1")}
            for method, path, sent in (("POST", "/mirror", body), ("GET", f"/mirror/mir_{'0' * 24}", None)):
                answer = await http.request(method, path, json=sent, headers=header)
                assert answer.status_code == 401, (token[:40], answer.text)
                assert answer.json()["error"]["code"] == "UNAUTHENTICATED"
        assert issuer.reads == 1
        answer = await http.get(f"/mirror/mir_{'0' * 24}", headers={"Authorization": f"Bearer {good}"})
        assert answer.status_code == 404
