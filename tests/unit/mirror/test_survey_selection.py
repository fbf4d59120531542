"""A narrowed listing shows a user what the whole one would have shown."""

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest

from bdn.core.errors import BdnError, InvalidSourceError, LimitExceededError, NoFilesMatchedError
from bdn.core.source.upstream import Identity, Location, Resolution, UpstreamFile
from bdn.core.source.uri import Patterns, WeightsSource, parse_source, select
from bdn.mirror.ingest.survey import Selected, Selector

TREE = (
    "README.md", "config.json", "model-1.bin", "original/README.md", "original/consolidated.pth", "text/config.json",
    "text/model.bin",
)  # fmt: skip


@dataclass
class Listed:
    """A source that lists what it is asked for, or more, and notes what that was."""

    paths: Sequence[str] = TREE
    more: bool = False
    asked: list[tuple[str, ...]] = field(default_factory=list)
    given: int = 0

    async def resolve(self) -> Resolution:
        return Resolution(None)

    async def list(self, resolution: Resolution, within: Sequence[str] = ("",)) -> AsyncIterator[UpstreamFile]:
        self.asked.append(tuple(within))
        for path in self.paths:
            if self.more or path.startswith(tuple(within)):
                self.given += 1
                yield UpstreamFile(path, 10, Identity.of("public", path), path, "1")

    async def locate(self, file: UpstreamFile) -> Location:
        raise NotImplementedError


async def choose(source: Listed, allow: Sequence[str], ignore: Sequence[str] = (), **limits: int) -> Selected:
    wanted = WeightsSource(parse_source("hf://org/model"), "/m", Patterns(tuple(allow), tuple(ignore)))
    selector = Selector(**{"limit_files": 100, "limit_bytes": 1000, **limits})
    return await selector.select(wanted, source, Resolution(None))


async def test_everything_is_listed_once_where_patterns_tell_nothing() -> None:
    for allow in ((), ("**/*.bin", "*.json")):
        source = Listed()
        await choose(source, allow)
        assert source.asked == [("",)]


async def test_only_the_part_is_listed_that_patterns_can_select_from() -> None:
    source = Listed()
    selected = await choose(source, ("original/", "model-*"), ("original/*.md",))
    assert [file.path for file in selected.files] == ["model-1.bin", "original/consolidated.pth"]
    assert selected.warnings == ()
    assert (source.asked, source.given) == ([("model-", "original/")], 3)


async def test_an_allow_pattern_without_a_match_gets_its_hint_from_the_rest_of_the_source() -> None:
    source = Listed()
    selected = await choose(source, ("config.json", "consolidated.pth"))
    assert [file.path for file in selected.files] == ["config.json"]
    (warning,) = selected.warnings
    assert warning.startswith(
        "allow_patterns 'consolidated.pth' matched no file; '**/consolidated.pth' would have matched"
    )
    assert source.asked == [("config.json", "consolidated.pth"), ("",)]


async def test_a_part_within_the_limit_is_selected_from_a_source_that_is_over_it() -> None:
    assert len((await choose(Listed(), ("text/",), limit_files=3)).files) == 2
    selected = await choose(Listed(), ("text/", "nothing"), limit_files=3)
    assert len(selected.files) == 2
    assert selected.warnings == ("allow_patterns 'nothing' matched no file",)
    for allow in ((), ("nothing",), ("*/*",)):
        with pytest.raises(LimitExceededError, match=r"files of hf://org/model: 4 is over the limit of 3"):
            await choose(Listed(), allow, limit_files=3)


async def test_the_selected_tree_is_checked_and_no_other() -> None:
    source = Listed(("a/b", "a", "c"))
    with pytest.raises(InvalidSourceError, match="'a' is both a file and a folder"):
        await choose(source, ())
    assert len((await choose(source, ("c",))).files) == 1
    with pytest.raises(LimitExceededError, match="bytes of"):
        await choose(Listed(), ("text/",), limit_bytes=19)


async def test_whatever_the_patterns_the_outcome_is_that_of_a_whole_listing() -> None:
    chance = random.Random(11)
    pieces = ("a", "b", "/", "*", "**", "?", "x", ".j", "**/", "[ab]")
    for _ in range(800):
        names = [f"{a}{b}" for a in ("", "a/", "a/b/", "ab/", "b/") for b in ("x", "xa", "y.j", ".j")]
        tree = tuple(name for name in names if chance.random() < 0.6) or ("x",)
        allow, ignore = (
            tuple(
                "".join(chance.choices(pieces, k=chance.randrange(1, 5))).lstrip("/") or "a"
                for _ in range(chance.randrange(most))
            )
            for most in (4, 3)
        )
        expected = select(tree, Patterns(allow, ignore))
        more = chance.random() < 0.1  # than it is asked for
        if not expected.paths:
            with pytest.raises(NoFilesMatchedError, match=f"none of the {len(tree)} files"):
                await choose(Listed(tree, more), allow, ignore)
            continue
        selected = await choose(Listed(tree, more), allow, ignore)
        found = (tuple(file.path for file in selected.files), selected.warnings)
        assert found == (expected.paths, expected.warnings), (tree, allow, ignore)


async def test_a_failure_of_the_second_look_is_the_upstream_s() -> None:
    class Failing(Listed):
        async def list(self, resolution: Resolution, within: Sequence[str] = ("",)) -> AsyncIterator[UpstreamFile]:
            if within == ("",):
                raise BdnError
            async for file in super().list(resolution, within):
                yield file

    with pytest.raises(BdnError):
        await choose(Failing(), ("config.json", "nothing"))


IMPOSSIBLE = ("logs\\old.txt", f"logs/{'x' * 300}", "logs/../up.txt", "logs/half\ud83d")


async def test_names_that_cannot_be_files_do_not_matter_where_patterns_leave_them_out() -> None:
    source = Listed((*TREE, *IMPOSSIBLE))
    for allow, ignore in (((), ("logs*", "logs/**")), (("*.json", "**/*.bin"), ())):
        selected = await choose(source, allow, ignore)
        assert {file.path for file in selected.files} <= set(TREE)


async def test_every_selected_name_that_cannot_be_a_file_is_named_with_how_to_leave_it_out() -> None:
    with pytest.raises(InvalidSourceError, match="cannot become a tree of files") as raised:
        await choose(Listed((*TREE, *IMPOSSIBLE, "a/b", "a")), ())
    said = str(raised.value)
    for named in (r"logs\\old.txt", "xxx", "../up.txt", r"half\ud83d", "'a' is both", "ignore_patterns"):
        assert named in said
    assert said.isascii()


async def test_many_impossible_names_are_counted() -> None:
    with pytest.raises(InvalidSourceError, match="; and 15 more"):
        await choose(Listed([f"{number}\\" for number in range(25)]), ())
