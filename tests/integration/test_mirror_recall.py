"""A commit that was published before is published again without looking at its files."""

import pytest

from tests.doubles.hub import Hub
from tests.doubles.hub_repository import HubRepository
from tests.support.mirror.service import MirrorUnderTest, source

pytest_plugins = ("tests.support.mirror.fixtures",)

FILES = {"config.json": b"{}", "weights.bin": b"w" * 1000}
SIZE = 1002


@pytest.fixture
def repository(hub: Hub) -> HubRepository:
    repository = hub.repo("org/model")
    repository.commit(FILES)
    return repository


async def test_an_unchanged_repository_costs_one_request(
    mirror: MirrorUnderTest, hub: Hub, repository: HubRepository
) -> None:
    first = await mirror.ready(source("hf://org/model@main", allow_patterns=["*.json", "*.nope"]))
    hub.log.clear()

    again = await mirror.ready(source("hf://org/model", "/elsewhere", allow_patterns=["*.json", "*.nope"]))

    assert hub.log.count() == 1
    assert (again["bytes_transferred"], again["bytes_reused"], again["files_total"]) == (0, 2, 1)
    assert again["sources"][0]["manifest"] == first["sources"][0]["manifest"]
    assert again["sources"][0]["warnings"] == first["sources"][0]["warnings"] != []
    assert again["sources"][0]["resolved_revision"] == first["sources"][0]["resolved_revision"]


@pytest.mark.parametrize("other", ["patterns", "commit", "evicted", "repository"])
async def test_whatever_differs_is_listed(
    mirror: MirrorUnderTest, hub: Hub, repository: HubRepository, other: str
) -> None:
    await mirror.ready(source("hf://org/model"))
    wanted = source("hf://org/model")
    match other:
        case "patterns":
            wanted = source("hf://org/model", ignore_patterns=["*.bin"])
        case "commit":
            repository.commit({"config.json": b"{ }"})
        case "evicted":
            assert (await mirror.evict(all=True))["bytes_freed"] == SIZE
        case _:
            hub.repo("org/other").commit(FILES)
            wanted = source("hf://org/other")
    hub.log.clear()

    await mirror.ready(wanted)

    assert hub.log.count("/tree/") == 1


async def test_access_is_asked_for_again(mirror: MirrorUnderTest, hub: Hub) -> None:
    """What one request could read with its secret is not recalled for one that has none."""
    hub.repo("org/private", private=True).commit(FILES)
    secret = {"auth_method": "CUSTOM_SECRET", "auth_secret_name": "hub-token"}
    await mirror.ready(source("hf://org/private", auth=secret))

    error = await mirror.failed(source("hf://org/private"))

    assert error["code"] == "AUTH_REQUIRED"
