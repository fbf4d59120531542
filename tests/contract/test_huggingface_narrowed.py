"""A narrowed listing of a repository finds what was asked for, each file once, and asks the hub for little."""

import random

import pytest
from huggingface_hub import close_session

from bdn.core.errors import BdnError, RevisionNotFoundError, SourceChangedError, UpstreamUnavailableError
from bdn.core.source.uri import Patterns, literal_prefixes, select
from bdn.sources.huggingface.tree import FOLDERS_ASKED_FOR, folders_of
from tests.contract.opening import Opened, open_hub
from tests.contract.source_contract import listed_within
from tests.doubles.faults import Fault, answer
from tests.doubles.hub import Hub

PAGE = 10
LARGE = {
    **{f"train/{number:03}.bin": b"x" for number in range(40)},
    **{f"test/{number:03}.bin": b"x" for number in range(40)},
    **{f"model-{number}.bin": b"x" for number in range(3)},
    "model-card/README.md": b"x",
    "model-card/images/a b+%.png": b"x",
    "config.json": b"{}",
    "config.json.d/more.json": b"{}",
    "é/ü.txt": b"x",
}


@pytest.fixture
def large(hub: Hub) -> Opened:
    hub.repo("org/large").commit(LARGE)
    return open_hub(hub, "hf://org/large")


def beginning(*prefixes: str) -> list[str]:
    return sorted(path for path in LARGE if path.startswith(prefixes))


@pytest.mark.parametrize(("within", "requests"), [
    (("",), 10),  # 88 files and 6 folders
    (("train/",), 4),
    (("train/01",), 4),  # what is directly in a folder is listed whole: the hub has no other way
    (("model-card/",), 1),
    (("model-card/images/",), 1),
    (("config.json",), 1 + 1),  # what is directly in the root, and the folder "config.json.d"
    (("model-",), 1 + 1),
    (("config.json", "model-"), 1 + 2),
    (("é/",), 1),
    (("é/ü",), 1),
    (("nowhere/",), 1),
    (("train/000.bin/",), 1),
    (("nowhere",), 1),
    (("model-card/", "train/"), 1 + 1 + 4),  # the first page of everything might have been all
    (("train/000", "train/001"), 4),
    (("model-card/R", "model-card/images/"), 1),  # one page of "model-card" is all there is
    (("nowhere/a/", "nowhere/b/c"), 1),
    (("/c",), 0),
    (("..", "a//b", "./c", "/d", "train/../test/"), 1),  # only the first can begin a path
])  # fmt: skip
async def test_what_begins_as_asked_is_listed_once_and_for_few_requests(
    hub: Hub, large: Opened, within: tuple[str, ...], requests: int
) -> None:
    async with large as source:
        assert await listed_within(source, *within) == beginning(*within)
    assert hub.log.count("/tree/") == requests


async def test_a_small_repository_costs_one_request_however_many_folders_are_wanted(hub: Hub) -> None:
    files = {f"{folder}/{name}": b"x" for folder in "abc" for name in ("x.json", "y.bin", "z")}
    hub.repo("org/small").commit(dict(list(files.items())[:7]))
    async with open_hub(hub, "hf://org/small") as source:
        assert await listed_within(source, "a/", "b/y", "c/") == ["a/x.json", "a/y.bin", "a/z", "b/y.bin", "c/x.json"]
    assert hub.log.count("/tree/") == 1


async def test_of_very_many_folders_that_begin_alike_the_one_that_holds_them_is_listed(hub: Hub) -> None:
    files = {f"s{number:02}/{name}": b"x" for number in range(FOLDERS_ASKED_FOR + 1) for name in "ab"}
    hub.repo("org/shards").commit({**files, "s-file": b"x", "other/a": b"x"})
    async with open_hub(hub, "hf://org/shards") as source:
        found = await listed_within(source, "s")
    assert found == sorted([*files, "s-file"])
    assert hub.log.count("/tree/") == 2 + 6  # 19 entries in the root; 55 in all
    assert hub.log.count("recursive=false") == 2


GONE = answer(404, headers={"X-Error-Code": "EntryNotFound"})


@pytest.mark.parametrize(("fault", "query", "within", "expected"), [
    (GONE, "cursor=", "train/", SourceChangedError),  # a folder that one page has is not empty on the next
    (GONE, "/tree/", "config", SourceChangedError),  # a missing root is no empty repository
    (answer(503), "/tree/", "train/", UpstreamUnavailableError),
    (answer(404, headers={"X-Error-Code": "RevisionNotFound"}), "/tree/", "train/", RevisionNotFoundError),
])  # fmt: skip
async def test_a_failure_of_a_narrowed_listing_is_not_taken_for_an_empty_folder(
    hub: Hub, large: Opened, fault: Fault, query: str, within: str, expected: type[BdnError]
) -> None:
    hub.fail(fault, query)
    async with large as source:
        with pytest.raises(expected):
            await listed_within(source, within)


async def test_whatever_is_asked_for_the_listing_holds_what_patterns_select_from_the_whole() -> None:
    chance = random.Random(7)
    names = [f"{a}{b}" for a in ("", "a/", "a/b/", "ab/", "b/a/", "b/") for b in ("x", "xy", "y.json", "b.bin", "a")]
    with Hub(page_size=4) as hub:
        for round_ in range(60):
            tree = {name: b"x" for name in names if chance.random() < 0.5} or {"x": b"x"}
            tree = {path: x for path, x in tree.items() if not any(other.startswith(f"{path}/") for other in tree)}
            hub.repo(f"org/r{round_}").commit(tree)
            pieces = ("a", "b", "/", "x", "*", "**", "?", ".json", "y")
            starts = [chance.choice(names)[: chance.randrange(1, 5)] for _ in range(chance.randrange(1, 6))]
            allow = tuple(start + "".join(chance.choices(pieces, k=chance.randrange(3))) for start in starts)
            patterns = Patterns(allow)
            async with open_hub(hub, f"hf://org/r{round_}") as source:
                found = await listed_within(source, *literal_prefixes(patterns))
            assert len(found) == len(set(found))
            assert set(found) <= set(tree)
            assert set(select(found, patterns).paths) == set(select(sorted(tree), patterns).paths), allow
    close_session()


def test_a_path_is_wanted_by_at_most_one_folder() -> None:
    for within in (("a/x", "a/b/"), ("a", "b/"), ("a/b/c", "a/b/d", "a/c/"), ("",)):
        folders = folders_of(within)
        for path in ("a/x", "a/b/c", "a/b/d/e", "a/c/d", "b/x", "ab", "c", "a/b/"):
            assert sum(folder.wants(path) for folder in folders) == path.startswith(within)
