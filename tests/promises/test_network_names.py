"""Names that do not resolve, for a while or for good: of upstreams for the mirror, and of the mirror for agents and commands."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest

from bdn.core.errors import BdnError
from bdn.net.client import MirrorClient
from tests.doubles.hub import Hub
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import MIB, Rig, noise, staged
from tests.support.content.trees import tree
from tests.support.mirror.scripted_names import Names
from tests.support.mirror.scripted_upstreams import FILES, STALL, TRANSFERS, Pauses, ScriptedUpstream
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test
from tests.support.network.fault_proxy_ring import HASTY
from tests.support.promises.tally import Tally

pytestmark = pytest.mark.promise("network")
pytest_plugins = (
    "tests.support.agent.fixtures",
    "tests.support.mirror.fixtures",
    "tests.support.mirror.upstream_fixtures",
)

LONGEST_SECONDS: Final = 60.0
FOR_GOOD: Final = 1_000_000
MIRROR: Final = "the-mirror"
PLACES: Final = ("listing", "content")


def is_byte_thread() -> bool:
    return threading.current_thread().name.startswith("copy")


@pytest.fixture
def names(
    request: pytest.FixtureRequest, upstream: ScriptedUpstream, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Names]:
    """The upstream by name. Listings are asked for by the loop, content by byte threads."""
    match request.node.callspec.params["upstream"]:
        case "hf":
            monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("127.0.0.1", "the-hub"))
            monkeypatch.setattr(hub._cdn, "url", hub.cdn_url.replace("127.0.0.1", "the-cdn"))
        case "s3":
            url = request.getfixturevalue("s3").url
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url.replace("127.0.0.1", "the-bucket"))
        case _:
            url = request.getfixturevalue("gcs").url
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", url.replace("127.0.0.1", "the-bucket"))
    names = Names(("the-hub", "the-cdn", "the-bucket"))
    if request.node.callspec.params["place"] == "content":
        names.chosen = is_byte_thread
    else:
        names.chosen = lambda: not is_byte_thread()
    with names.resolving():
        yield names


@pytest.fixture
async def mirror(names: Names, no_turns: None, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with mirror_under_test(tmp_path / "mirror", pause=Pauses(), stall=STALL, transfers=TRANSFERS) as mirror:
        yield mirror


@pytest.mark.parametrize("place", PLACES)
async def test_an_upstream_whose_name_is_lost_for_a_while_is_asked_again(
    mirror: MirrorUnderTest, upstream: ScriptedUpstream, names: Names, place: str, tally: Tally
) -> None:
    names.lost = 3
    async with asyncio.timeout(LONGEST_SECONDS):
        document = await mirror.ready(upstream.wanted)

    found = await mirror.tree(document["sources"][0]["manifest"])
    tally.add(scenarios=1, faults=names.met, wrong=found != FILES)
    assert names.met == 3


@pytest.mark.parametrize("place", PLACES)
async def test_an_upstream_whose_name_stays_lost_is_named_and_nothing_is_published(
    mirror: MirrorUnderTest, upstream: ScriptedUpstream, names: Names, place: str, tally: Tally
) -> None:
    names.lost = FOR_GOOD
    async with asyncio.timeout(LONGEST_SECONDS):
        error = await mirror.failed(upstream.wanted)
    names.lost = 0
    document = await mirror.ready(upstream.wanted)

    found = await mirror.tree(document["sources"][0]["manifest"])
    tally.add(scenarios=1, faults=names.met, refused=1, wrong=found != FILES)
    assert (error["code"], error["retryable"]) == ("UPSTREAM_UNAVAILABLE", True)
    assert any(name in error["message"] for name in names.known), error
    assert upstream.wanted["source"].split("@")[0] in error["message"]


async def test_an_agent_that_cannot_resolve_its_mirror_serves_what_it_holds_and_goes_on_when_it_can(
    server: AgentMirror, tmp_path: Path, tally: Tally
) -> None:
    """It starts so, too."""
    mirror = server.renewed(is_packed=True)
    files = {"large": noise(9 * MIB, 1), "small": noise(30_000, 2)}
    held, other = mirror.publish(files), mirror.publish({"other": noise(2 * MIB, 3)})
    names = Names((MIRROR,))
    rig = Rig(mirror, tmp_path / "node", {"url": mirror.url.replace("127.0.0.1", MIRROR)})
    async with asyncio.timeout(LONGEST_SECONDS):
        with names.resolving():
            async with rig.agent(waits=HASTY) as agent:
                await staged(agent, mirror, held)
            names.lost = FOR_GOOD
            async with rig.agent(waits=HASTY) as agent:
                mirror.forget()
                stage = await staged(agent, mirror, held, job="again")
                with pytest.raises(BdnError, match=MIRROR) as caught:
                    await staged(agent, mirror, other, job="other")
                beaten = len(mirror.heartbeats)
                names.lost = 0
                after = await staged(agent, mirror, other, job="after")
                await agent.heartbeats.beat()

    tally.add(scenarios=2, faults=names.met, refused=1)
    tally.add(wrong=tree(Path(stage.mounts[0].path)) != files, lost=not len(mirror.heartbeats) > beaten)
    tally.add(wrong=tree(Path(after.mounts[0].path)) != {"other": noise(2 * MIB, 3)})
    assert not mirror.documents["/manifests/" + str(held.digest)]
    assert (caught.value.code, caught.value.transient) == ("STORE_UNAVAILABLE", True)


async def test_a_command_that_cannot_resolve_its_mirror_says_so(tally: Tally) -> None:
    with Names((MIRROR,), lost=FOR_GOOD).resolving():
        async with MirrorClient(f"http://{MIRROR}:8460") as client:
            with pytest.raises(BdnError, match=f"http://{MIRROR}:8460") as caught:
                await client.mirrors({})
    tally.add(scenarios=1, faults=1, refused=1)
    assert (caught.value.code, caught.value.transient) == ("STORE_UNAVAILABLE", True)
