"""Who sees what of mirrors, models, jobs and operations on the page, and who may evict from it."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import quote

import httpx2
import pytest

from bdn.core.errors import Fact
from bdn.core.events import Event
from bdn.wire.event_schema import NodeEvent
from tests.support.mirror.page_operations import stage
from tests.support.mirror.page_world import PageWorld, held, manifest_of, page_world
from tests.support.mirror.service import Json
from tests.support.mirror.training_jobs import JobClient, spec

pytestmark = [pytest.mark.embedded("the page reads through the services, whatever is behind them")]
SAME_ORIGIN: Final = {"Sec-Fetch-Site": "same-origin"}
SOURCE: Final = "hf://org/model"
MANIFEST: Final = f"b3:{manifest_of(SOURCE)}"
JOB: Final = "secret-job"


class Viewer:
    """A browser with a session."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self.http = http

    async def see(self, path: str, status: int = 200) -> str:
        answer = await self.http.get(path)
        assert answer.status_code == status, (path, answer.status_code, answer.text)
        return re.sub('placeholder="[^"]*"', "", answer.text)

    async def send(self, path: str, status: int = 303, headers: dict[str, str] = SAME_ORIGIN, /, **form: str) -> str:
        """The address to which a form leads, or else the page that refuses it."""
        answer = await self.http.post(path, data=form, headers=headers)
        assert answer.status_code == status, (path, answer.status_code, answer.text)
        return str(answer.headers.get("location", answer.text))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[PageWorld]:
    """A mirror of the organisation and one of the team Default; a node holds a manifest for a job."""
    async with page_world(tmp_path / "mirror") as world:
        await world.mirror.http.post("/teams", json={"name": "research"})
        await world.add_token("controller", "controller")
        await world.add_token("team", "controller", team="Default")
        await world.add_token("other team", "controller", team="research")
        await world.add_token("stranger", "controller", organisation="rival")
        await world.add_mirror(SOURCE, "READY", size=500)
        await world.add_mirror("hf://team/model", "SYNCING", team="Default", done=0.5)
        await world.agent("n1", "c", holdings=[held(SOURCE, 500, jobs=[JOB])], stages=[stage(JOB, 1, 9)]).beat()
        yield world


Viewing = Callable[[str], Awaitable[Viewer]]


@pytest.fixture
async def viewer(world: PageWorld) -> AsyncIterator[Viewing]:
    """A viewer with the token of this name; without a session for an unknown name."""
    async with AsyncExitStack() as stack:

        async def begin(name: str) -> Viewer:
            http = await stack.enter_async_context(httpx2.AsyncClient(base_url=world.url, trust_env=False))
            if name in world.tokens:
                answer = await http.post("/ui/login", data={"token": world.tokens[name]}, headers=SAME_ORIGIN)
                assert answer.status_code == 303, answer.text
            return Viewer(http)

        yield begin


def mirror_of(page: str) -> str:
    return str(re.findall(r"mir_[0-9a-f]{24}", page)[0])


async def test_a_team__sees_its_own_mirrors_and_jobs_and_no_models(world: PageWorld, viewer: Viewing) -> None:
    operator, team, other = [await viewer(name) for name in ("operator", "team", "other team")]
    client = await JobClient.of(world.mirror, "llama", "Default")
    job = await client.create(spec(name="the-teams-job"))
    own, everything = await team.see("/ui/mirrors"), await operator.see("/ui/mirrors")

    assert 'href="/ui/model"' in everything
    assert 'href="/ui/model"' not in own  # nor in the menu
    assert "hf://team/model" in own
    assert SOURCE not in own
    assert "/ui/model?of=" not in own
    assert {"hf://team/model", SOURCE} <= set(re.findall(r"hf://\w+/\w+", everything))
    assert "the-teams-job" in await team.see("/ui/jobs")
    assert "the-teams-job" in await team.see(f"/ui/job?id={job}")
    assert "hf://" not in await other.see("/ui/mirrors")
    assert "the-teams-job" not in await other.see("/ui/jobs") + await other.see(f"/ui/job?id={job}")
    await other.see(f"/ui/mirror?id={mirror_of(own)}", 404)
    for path in ("/ui/model", f"/ui/model?of={SOURCE}", "/ui/model?of=/models/m"):
        assert "use a token without a team" in await team.see(path, 403)


async def test_search__finds_jobs_by_a_part_of_their_id_or_name(world: PageWorld, viewer: Viewing) -> None:
    operator, other, stranger = [await viewer(name) for name in ("operator", "other team", "stranger")]
    client = await JobClient.of(world.mirror)
    wanted = await client.create(spec(name="Pretrain 7B_a"))
    await client.create(spec(name="pretrain 7BXa"))
    many = [await client.create(spec(name="a sweep")) for _ in range(21)]

    def found(page: str) -> list[str]:
        return re.findall(r"<li>Job <a href=\"/ui/job\?id=([a-z0-9]{10})\"", page)

    for text in (wanted, wanted[1:9], "TRAIN 7b_"):
        place = await operator.http.get("/ui/search", params={"q": text})
        assert place.headers.get("location") == f"/ui/job?id={wanted}", text
        for one in (other, stranger):
            assert (await one.http.get("/ui/search", params={"q": text})).status_code == 200, text
    assert found(await operator.see("/ui/search?q=a+swee")) == many[:0:-1]
    assert found(await operator.see("/ui/search?q=%25")) == []


async def test_another_organisation__sees_nothing(world: PageWorld, viewer: Viewing) -> None:
    operator, stranger = await viewer("operator"), await viewer("stranger")
    job = await (await JobClient.of(world.mirror)).create(spec(name="our-job"))
    plan = await operator.send("/ui/eviction", of=MANIFEST, tier="mirror")
    prefetch = await operator.send("/ui/prefetch", of=MANIFEST, cluster="c")
    mirror = mirror_of(await operator.see("/ui/mirrors"))

    assert "secret-job" in await operator.see(f"/ui/job?id={JOB}") + await operator.see(plan)
    for path in (
        "/ui/mirrors",
        "/ui/model",
        "/ui/model?of=/models/m",
        "/ui/jobs",
        "/ui/jobs?all=yes",
        f"/ui/job?id={job}",
    ):
        assert not re.search("hf://|our-job|n1", await stranger.see(path)), path
    assert "n1" not in await stranger.see(f"/ui/job?id={JOB}")
    for path in (f"/ui/mirror?id={mirror}", f"/ui/model?of={SOURCE}", f"/ui/model?of={MANIFEST}", plan, prefetch):
        await stranger.see(path, 404)
    for form in ({"of": MANIFEST, "tier": "mirror"}, {"of": SOURCE, "tier": "mirror"}):
        await stranger.send("/ui/eviction", 404, **form)
    for name in ("confirm", "undo"):
        await stranger.send(f"/ui/eviction/{name}", 404, id=plan.partition("=")[2], typed=SOURCE)
    await stranger.send("/ui/prefetch", 404, of=MANIFEST, cluster="c")


async def test_a_controller__evicts_from_the_mirror_alone_and_sees_no_jobs_of_nodes(
    world: PageWorld, viewer: Viewing
) -> None:
    operator, controller = await viewer("operator"), await viewer("controller")
    path = f"/ui/model?of={SOURCE}"
    page = await controller.see(path)

    assert '<select id="tier-0"' in await operator.see(path)
    assert '<select id="tier-0"' not in page
    assert "secret-job" not in page
    assert "1 job holds it" not in page
    for form in ({"tier": "node"}, {"tier": ""}, {"tier": "mirror", "node": "n1"}):
        status = 404 if form == {"tier": "mirror", "node": "n1"} else 403
        await controller.send("/ui/eviction", status, of=MANIFEST, **form)
    plan = await controller.send("/ui/eviction", of=MANIFEST, tier="mirror")
    page = await controller.see(plan)
    assert "stays: in use" in page
    assert "There is nothing to evict" in page
    assert "secret-job" not in page
    done = await controller.send("/ui/eviction/confirm", id=plan.partition("=")[2], typed=SOURCE)
    assert (await world.mirror.get(f"/evictions/{done.partition('=')[2]}"))["status"] == "REFUSED"


async def test_a_team__is_offered_no_eviction_and_is_refused(world: PageWorld, viewer: Viewing) -> None:
    team = await viewer("team")

    for path, form in (
        ("/ui/eviction", {"of": MANIFEST, "tier": "mirror"}),
        ("/ui/eviction/confirm", {"id": f"evi_{'0' * 24}"}),
        ("/ui/eviction/undo", {"id": f"evi_{'0' * 24}"}),
        ("/ui/prefetch", {"of": MANIFEST, "cluster": "c"}),
    ):
        await team.send(path, 403, **form)
    assert world.mirror.operations("eviction") + world.mirror.operations("prefetch") == []


async def test_forms__are_refused_from_other_sites_and_without_a_session(world: PageWorld, viewer: Viewing) -> None:
    operator = await viewer("operator")
    nobody = await viewer("nobody")
    forged: list[dict[str, str]] = [{"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}, {}]

    for path in ("/ui/eviction", "/ui/eviction/confirm", "/ui/eviction/undo", "/ui/prefetch"):
        for headers in forged:
            await operator.send(path, 403, headers, of=MANIFEST, tier="mirror")
        await nobody.send(path, 401, of=MANIFEST, tier="mirror")
    assert world.mirror.operations("eviction") + world.mirror.operations("prefetch") == []


async def test_wrong_forms__are_refused_with_what_to_do(world: PageWorld, viewer: Viewing) -> None:
    operator = await viewer("operator")
    real = await operator.send("/ui/eviction", of=MANIFEST, tier="mirror")

    assert "go back to the model" in await operator.send("/ui/eviction", 422, of="")
    assert "node, source or tier" in await operator.send("/ui/eviction", 422, of=MANIFEST, tier="moon")
    assert "node, source or tier" in await operator.send("/ui/eviction", 422, of="x" * 5000)
    assert "evicted" in await operator.send("/ui/eviction/confirm", 422, id=real.partition("=")[2], typed="hf://org/x")
    await operator.send("/ui/eviction/confirm", 404, id="nonsense")
    await operator.send("/ui/eviction/undo", 404, id=real.partition("=")[2])  # a plan took nothing away
    await operator.send("/ui/prefetch", 404, of=MANIFEST, cluster="none")
    assert "name the target" in await operator.send("/ui/prefetch", 422, of=MANIFEST)
    for path in ("/ui/mirrors?status=MOON", "/ui/mirrors?before=x", "/ui/model?after=x", "/ui/model?of=nonsense"):
        await operator.see(path, 422)


async def test_mirrors__come_in_pages_and_by_status_and_source(world: PageWorld, viewer: Viewing) -> None:
    for number in range(120):
        await world.add_mirror(f"hf://org/m{number}", "CANCELED", age=1000 + number)
    operator, found = await viewer("operator"), list[str]()
    path = "/ui/mirrors?status=CANCELED"
    while path:
        page = await operator.see(path)
        found += re.findall(r"hf://org/m\d+", page)
        path = next(iter(re.findall(r'rel="next" href="([^"]+)"', page)), "").replace("&amp;", "&")

    assert found == [f"hf://org/m{number}" for number in range(120)]
    assert set(re.findall(r"hf://org/m\d+", await operator.see("/ui/mirrors?source=hf://org/m7"))) == {"hf://org/m7"}


async def test_a_path_of_a_stage__leads_to_the_manifest_that_an_event_names(world: PageWorld, viewer: Viewing) -> None:
    operator, name = await viewer("operator"), f"stg_{'a' * 24}"
    await world.add_mirror("hf://org/elsewhere", "READY")
    facts: dict[str, Fact] = {"stage": name, "job": JOB, "node": 0, "cluster": 0, "mirror": 5}
    event = Event.of("arrived", facts, manifest=MANIFEST, organisation="default")
    told: Json = NodeEvent.of(replace(event, id="run/1", at=1_790_000_000.0)).model_dump()
    await world.agent("n1", "c", holdings=None).beat(events=[told])

    job_path = await operator.see(f"/ui/model?of={quote('/models/m/config.json')}")
    node_path = await operator.see(f"/ui/model?of={quote(f'/cache/mounts/{name}/models/m/config.json')}")
    assert {SOURCE, "hf://org/elsewhere"} <= set(re.findall(r"hf://\w+/\w+", job_path))
    assert "hf://org/elsewhere" not in node_path
    assert f'href="/ui/job?id={JOB}"' in node_path
    assert "No mirrored source" in await operator.see("/ui/model?of=/data/x")


async def test_a_name_of_one_model__never_shows_another_organisations_holdings(
    world: PageWorld, viewer: Viewing
) -> None:
    """What the page reads by manifests is what GET /manifests lists."""
    await world.add_mirror("hf://theirs/model", "READY", organisation="rival")
    theirs = f"b3:{manifest_of('hf://theirs/model')}"
    holdings = [held(SOURCE, 500), held("hf://theirs/model", 5)]
    await world.agent("n1", "c", holdings=holdings).beat()
    names = world.mirror.service.api.state.provided
    found = next(one for kind, one in names.items() if kind.__name__ == "Names")

    assert set(await found.held_of("default", [MANIFEST, theirs, f"b3:{'0' * 64}"])) == {MANIFEST}
    assert (await found.held_of("default", [MANIFEST]))[MANIFEST].nodes.keys() == {"c/n1"}
