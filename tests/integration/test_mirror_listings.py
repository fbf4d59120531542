"""Listings of a mirror: narrowed where patterns allow it, few requests, and nothing read where nothing changed."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from tests.doubles.hub import Hub
from tests.doubles.hub_repository import HubRepository
from tests.doubles.s3_numbers import NAME, NumberedBucket
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source

pytest_plugins = ("tests.support.mirror.fixtures",)

FILES = 3500


@pytest.fixture
def repository(hub: Hub) -> HubRepository:
    """Four pages of a hub; all files have one of a few contents, so that they are copied in no time."""
    repository = hub.repo("org/large")
    repository.commit(
        {
            **{f"data/{number // 500}/{number:05}.txt": b"%d" % (number % 5) for number in range(FILES - 2)},
            "weights/a.txt": b"a",
            "config.json": b"{}",
        }
    )
    return repository


@pytest.fixture
def numbers(upstreams: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[NumberedBucket]:
    """Three pages of a bucket."""
    with NumberedBucket(2500) as bucket:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", bucket.url)
        yield bucket


@pytest.fixture
async def mirror(upstreams: None, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with mirror_under_test(tmp_path / "mirror") as mirror:
        yield mirror


async def test_an_unchanged_source_is_decided_by_its_listing_alone(
    mirror: MirrorUnderTest, hub: Hub, repository: HubRepository
) -> None:
    first = await mirror.ready(source("hf://org/large"))
    assert first["files_total"] == FILES
    repository.commit({})  # another commit with the same files, so that nothing is recalled
    hub.log.clear()

    plan = await mirror.plan(source("hf://org/large"))
    assert (plan["files"], plan["bytes_to_transfer"]) == (FILES, 0)
    assert hub.log.count() == 1 + 4

    hub.log.clear()
    again = await mirror.ready(source("hf://org/large"))
    assert (again["bytes_transferred"], again["bytes_reused"]) == (0, first["bytes_total"])
    assert again["sources"][0]["manifest"] == first["sources"][0]["manifest"]
    assert hub.log.count() == 1 + 4
    assert hub.log.count("/resolve/") == 0


async def test_an_unchanged_bucket_is_decided_by_its_listing_alone(
    numbers: NumberedBucket, mirror: MirrorUnderTest
) -> None:
    wanted = source(f"s3://{NAME}/")
    first = await mirror.ready(wanted)
    assert (first["files_total"], first["bytes_transferred"]) == (len(numbers.keys), numbers.bytes_total)
    assert numbers.log.count() == 3 + len(numbers.keys)  # pages, and each object once

    numbers.log.clear()
    assert (await mirror.plan(wanted))["bytes_to_transfer"] == 0
    again = await mirror.ready(wanted)
    assert (again["bytes_transferred"], again["bytes_reused"]) == (0, numbers.bytes_total)
    assert again["sources"][0]["manifest"] == first["sources"][0]["manifest"]
    assert numbers.log.count() == numbers.log.count("list-type=2") == 3 + 3

    numbers.log.clear()
    numbers.generation += 1
    assert (await mirror.plan(wanted))["bytes_to_transfer"] == numbers.bytes_total  # the double does tell changes


async def test_a_pattern_lists_its_part_of_a_bucket_alone(numbers: NumberedBucket, mirror: MirrorUnderTest) -> None:
    plan = await mirror.plan(source(f"s3://{NAME}/data", allow_patterns=["0001/000100?.txt", "0002/**"]))
    assert plan["files"] == 10 + 500
    prefixes = [parse_qs(request.target.partition("?")[2])["prefix"][0] for request in numbers.log.find()]
    assert prefixes == ["data", "data/0001/000100", "data/0002/"]  # first: is "data" an object or a folder?


async def test_a_pattern_with_a_literal_beginning_lists_its_folder_alone(
    mirror: MirrorUnderTest, hub: Hub, repository: HubRepository
) -> None:
    narrow = source("hf://org/large", allow_patterns=["weights/*"])
    document = await mirror.ready(narrow)
    assert (document["files_total"], document["sources"][0]["warnings"]) == (1, [])
    assert [request.target.partition("?")[0].rpartition("/")[2] for request in hub.log.find("/tree/")] == ["weights"]

    hub.log.clear()
    assert (await mirror.ready(narrow))["bytes_transferred"] == 0
    assert hub.log.count() == 1  # recalled: nothing is listed


async def test_a_pattern_that_matches_nothing_in_its_folder_is_told_as_after_a_whole_listing(
    mirror: MirrorUnderTest, hub: Hub, repository: HubRepository
) -> None:
    document = await mirror.ready(source("hf://org/large", allow_patterns=["config.json", "a.txt"]))
    (warning,) = document["sources"][0]["warnings"]
    assert "'a.txt' matched no file; '**/a.txt' would have matched" in warning
    assert hub.log.count("/tree/") == 1 + 4  # the root, where the file should be, and then everything

    error = await mirror.failed(source("hf://org/large", allow_patterns=["weights/b*"]))
    assert error["code"] == "NO_FILES_MATCHED"
    assert f"none of the {FILES} files" in error["message"]
