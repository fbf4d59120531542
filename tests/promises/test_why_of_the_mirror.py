"""What the mirror collected, found, repaired or could not repair is on record, and an operator can ask why."""

import random
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pytest

from bdn.core.chunk import Digest, digest_of
from bdn.mirror.upkeep.repair import AGAIN_SECONDS
from tests.doubles.hub import Hub
from tests.doubles.hub_repository import HubRepository
from tests.support.content.calendar import DAY, Calendar
from tests.support.crash.rot import rot
from tests.support.mirror.service import (
    LONGEST_SECONDS,
    Json,
    MirrorUnderTest,
    mirror_under_test,
    source,
    until,
)
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Shell, wait_until

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = pytest.mark.usefixtures("backend")
TOKEN: Final = "operator-token"
FILES: Final = {"weights": b"w" * 2_000_000, "a.txt": b"12345", "b.txt": b"67890"}
MODEL: Final = source("hf://org/model")


@pytest.fixture
def repository(hub: Hub) -> HubRepository:
    repository = hub.repo("org/model")
    repository.commit(FILES)
    return repository


@pytest.fixture
async def mirror(
    upstreams: None, repository: HubRepository, tmp_path: Path, calendar: Calendar
) -> AsyncIterator[MirrorUnderTest]:
    async with mirror_under_test(
        tmp_path, bearer=TOKEN, auth="token", token=TOKEN, clock=calendar, collect_seconds=0, scrub_seconds=0
    ) as service:
        yield service


async def mirrored(mirror: MirrorUnderTest, wanted: Json, organisation: str = "default") -> str:
    return str((await mirror.ready_for(organisation, wanted)).sources[0].manifest)


async def told(mirror: MirrorUnderTest, organisation: str = "default", **params: Any) -> list[Json]:
    """What the organisation hears, oldest first, without what mirrors tell."""
    answer = await mirror.http.get("/events", params=params, headers={"BDN-Organisation": organisation})
    assert answer.status_code == 200, answer.text
    return [one for one in reversed(answer.json()["items"]) if one["kind"] not in ("mirrored", "reused")]


async def kinds(mirror: MirrorUnderTest, organisation: str = "default", **params: Any) -> list[str]:
    return [one["kind"] for one in await told(mirror, organisation, **params)]


async def verified(mirror: MirrorUnderTest, **request: Any) -> list[str]:
    """The outcomes of a verification of all that the mirror stores."""
    return [item["outcome"] for item in (await mirror.verify(tier="mirror", **request))["items"]]


def spoil(mirror: MirrorUnderTest, chunk: Digest, how: str) -> None:
    """From now on the store has other bytes under this name."""
    with mirror.behind.chunk(chunk) as stored:
        rot(stored, how)


@pytest.mark.production
@pytest.mark.promise("collection")
async def test_what_was_collected_says_so_to_all(mirror: MirrorUnderTest, calendar: Calendar) -> None:
    manifest = await mirrored(mirror, MODEL)
    assert await mirrored(mirror, MODEL, "rival") == manifest
    for organisation in ("default", "rival"):
        answer = await mirror.http.post(
            "/evictions",
            params={"wait": LONGEST_SECONDS},
            json={"all": True, "tier": "mirror"},
            headers={"BDN-Organisation": organisation},
        )
        assert answer.json()["status"] == "DONE"
    calendar.days = 8
    planned = await mirror.collect(dry_run=True)
    assert (planned["kinds"][0]["count"], await kinds(mirror, manifest=manifest)) == (1, ["tombstoned"])

    collection = await mirror.collect()
    for organisation in ("default", "rival"):
        (_, gone) = await told(mirror, organisation, manifest=manifest)
        assert gone["kind"] == "collected"
        assert gone["facts"]["bytes"] == collection["bytes_freed"] == planned["bytes_freed"]
        assert gone["sentence"] == "was collected from the mirror's store, which freed 2 MB"
        assert abs(datetime.fromisoformat(gone["at"]).timestamp() - calendar()) < DAY  # eight days after the mirror
    assert await kinds(mirror, "stranger", manifest=manifest) == []


@pytest.mark.production
@pytest.mark.promise("corruption")
async def test_damage_of_the_store_and_its_repair_are_told_to_all(mirror: MirrorUnderTest) -> None:
    manifest = await mirrored(mirror, MODEL)
    await mirrored(mirror, MODEL, "rival")
    chunk = str(digest_of(FILES["weights"]))
    spoil(mirror, digest_of(FILES["weights"]), "flipped")
    assert await verified(mirror) == ["repaired"]

    for organisation in ("default", "rival"):
        for about in ({"manifest": manifest}, {"digest": chunk}):
            damaged, repaired = await told(mirror, organisation, **about)
            assert (damaged["kind"], damaged["manifest"], damaged["digest"]) == ("damaged", manifest, chunk)
            assert damaged["sentence"].startswith(f"has a damaged part: {chunk} in the tier mirror (")
            assert repaired["sentence"].startswith(f"was repaired: {chunk} in the tier mirror (")
            assert damaged["node"] is None
    assert await kinds(mirror, "stranger", digest=chunk) == []


@pytest.mark.promise("corruption")
async def test_what_cannot_be_repaired_is_said_once_and_that_it_came_back(
    mirror: MirrorUnderTest, repository: HubRepository, calendar: Calendar
) -> None:
    manifest = await mirrored(mirror, MODEL)
    spoil(mirror, digest_of(FILES["weights"]), "truncated")
    repository.disabled = True
    for _ in range(2):
        assert await verified(mirror) == ["lost"]
    assert await mirror.metric("bdn_mirror_damaged_chunks") == 1
    assert await kinds(mirror, manifest=manifest) == ["damaged", "lost"]
    (_, lost) = await told(mirror, manifest=manifest)
    assert lost["sentence"].startswith("lost a part, which neither an agent nor its upstream has now: ")
    assert "org/model" not in lost["sentence"]  # whoever has the manifest hears it, wherever they have it from

    repository.disabled = False
    calendar.days += AGAIN_SECONDS / DAY
    await until(lambda: mirror.damaged() == 0)
    assert await kinds(mirror, manifest=manifest) == ["damaged", "lost", "repaired"]


# --- ``bdn-admin why``, as an operator runs it, against a mirror and an agent in processes of their own ---
SIZE = 2_000_000


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as double:
        yield double


def staged(node: Shell, source: str, job: str) -> tuple[str, str, str]:
    """Manifest, stage and path."""
    mirrored = node.run("bdn", "mirror", source, "--mount", "/app/model", "--wait", "--json").document
    stage = node.run("bdn", "stage", mirrored["id"], "--job", job, "--json").document
    assert stage["state"] == "READY", stage
    return mirrored["sources"][0]["manifest"], stage["id"], stage["mounts"][0]["path"]


@pytest.mark.promise("leases")
def test_an_operator_hears_why(tmp_path: Path, hub: Hub) -> None:
    for name in ("one", "two"):
        content = random.Random(name).randbytes(SIZE)
        hub.repo(f"org/{name}").commit({"config.json": b"{}", "deep/model.safetensors": content})
    code = {"PYTHONPATH": str(Path(__file__).parents[2])}
    cluster = Cluster(tmp_path, {"HF_ENDPOINT": hub.url, **code})
    with cluster.mirror(), cluster.agent(BDN_AGENT_CACHE_BYTES="3MB", BDN_AGENT_ROLES="node") as node:
        _, first, _ = staged(node, "hf://org/one", "job-one")
        assert node.run("bdn", "unstage", first).code == 0
        two, second, path = staged(node, "hf://org/two", "job-two")

        def why(*arguments: str) -> str:
            done = node.run("bdn-admin", "why", *arguments)
            assert done.code == 0, done.out + done.err
            return done.out

        told = [""]

        def is_told() -> bool:
            told.append(why("hf://org/one"))
            return "it was evicted " in told[-1]

        wait_until(is_told, what="the agent's events")
        assert told[-1].startswith("hf://org/one is cached on the mirror; not on node default/node-1\n")
        assert f"to make room for job job-two (stage {second}), which brought {two[:15]}…" in told[-1]
        assert "it was mirrored from hf://org/one at " in told[-1]
        document = node.run("bdn-admin", "why", two, "--node", "node-1", "--json").document
        assert [(place["place"], place["cached"]) for place in document["places"]] == [("node default/node-1", True)]

        shown = why(f"{path}/deep/model.safetensors")
        assert "is whole in the cache: deep/model.safetensors (b3:" in shown
        assert f"stage {second} of job job-two is READY, and leases it until it is released" in shown
        assert "2 MB from the mirror" in shown
        assert "was READY for job job-two" in shown
        for unknown in ("hf://org/three", f"{path}/nothing"):
            assert node.run("bdn-admin", "why", unknown).code == 4, unknown
