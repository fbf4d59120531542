"""Where a job with a training cache runs, cell by cell; and what a summary keeps of very much."""

import stat
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.errors import CacheAffinityError
from bdn.core.training.affinity import place
from bdn.core.training.cache_summary import CacheSummary, SummaryEntry

# The pinned cluster, who has the GPUs, and where the job would run without a cache: with affinity required, and without. None is refused.
CELLS: list[tuple[str | None, set[str], str, str | None, str | None]] = [
    (None, {"east", "west"}, "east", "east", "east"),
    (None, {"east", "west"}, "west", "west", "west"),
    ("east", {"east"}, "east", "east", "east"),
    ("east", {"east", "west"}, "east", "east", "east"),
    ("east", {"east", "west"}, "west", "east", "east"),  # it waits there
    ("east", {"west"}, "west", None, "west"),
    ("east", {"west", "north"}, "west", None, "west"),
    ("east", {"west", "north"}, "south", None, "north"),
    ("east", {"west"}, "east", None, "west"),
    ("east", set(), "east", None, None),
    ("east", set(), "west", None, None),
]


@pytest.mark.parametrize("require", [True, False])
@pytest.mark.parametrize(("pinned", "offering", "asking", "required", "free"), CELLS)
def test_where_a_job_with_a_cache_runs(
    pinned: str | None, offering: set[str], asking: str, required: str | None, free: str | None, *, require: bool
) -> None:
    def run() -> str:
        return place(
            "llama",
            pinned=pinned,
            offering=offering,
            asking=asking,
            gpu_type="H200",
            require_cache_affinity=require,
        )

    if (expected := required if require else free) is not None:
        assert run() == expected
        return
    with pytest.raises(CacheAffinityError) as caught:
        run()
    for named in ("llama", "cluster east", "GPU H200", "request GPUs that this cluster has", "require_cache_affinity"):
        assert named in str(caught.value)


FILE, FOLDER, LINK, FIFO = stat.S_IFREG | 0o640, stat.S_IFDIR | 0o755, stat.S_IFLNK | 0o777, stat.S_IFIFO | 0o600

Tree = dict[str, SummaryEntry]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """By path, folders before what is in them."""
    found: Tree = {}
    folders = [""]
    for number in range(draw(st.integers(0, 30))):
        parent, mode = draw(st.sampled_from(folders)), draw(st.sampled_from([FILE, FILE, FOLDER, FOLDER, LINK, FIFO]))
        path = f"{parent}{number}"
        found[path] = SummaryEntry(path, draw(st.integers(0, 9)), float(number), mode)
        if mode == FOLDER:
            folders.append(f"{path}/")
    return found


def depth(path: str) -> int:
    return path.count("/") + 1


@given(trees(), st.integers(1, 12), st.randoms(use_true_random=False))
def test_a_summary_is_all_to_the_greatest_depth_that_fits_and_loses_no_byte(
    tree: Tree, limit: int, chance: Random
) -> None:
    known = {path: entry for path, entry in tree.items() if entry.mode != FIFO}
    deepest = max((level for level in range(40) if sum(depth(path) <= level for path in known) <= limit), default=0)
    expected = {}
    for path, entry in known.items():
        if depth(path) > deepest:
            continue
        size = entry.size if entry.mode != FOLDER else 0
        if entry.mode == FOLDER and depth(path) == deepest:
            size = sum(one.size for name, one in known.items() if name.startswith(f"{path}/") and one.mode != FOLDER)
        expected[path] = SummaryEntry(path, size, entry.modified, entry.mode)

    order = list(tree)
    chance.shuffle(order)  # siblings in any order; folders still before what is in them
    order.sort(key=depth)
    for paths in (tree, order):
        summary = CacheSummary(limit)
        for path in paths:
            summary.add(tree[path])
            assert len(summary) <= limit
        assert {entry.path: entry for entry in summary.entries()} == expected
        assert summary.size == sum(entry.size for entry in known.values() if entry.mode != FOLDER)
        assert summary.files == sum(entry.mode != FOLDER for entry in known.values())


def test_long_paths_are_fewer() -> None:
    summary = CacheSummary()
    for number in range(400):
        summary.add(SummaryEntry(f"{number}", 0, 0.0, FOLDER))
        summary.add(SummaryEntry(f"{number}/{'x' * 50_000}", 1, 0.0, FILE))
    assert len(summary) == 400
    assert sum(entry.size for entry in summary.entries()) == 400


def test_entries_are_told_as_ls_does_in_the_order_of_their_paths() -> None:
    summary = CacheSummary()
    for path, mode in (("b", FOLDER), ("b/x", FILE), ("a", LINK)):
        summary.add(SummaryEntry(path, 1, 0.0, mode))
    assert [(one.path, one.file_type, one.permissions, one.size) for one in summary.entries()] == [
        ("a", "symlink", "lrwxrwxrwx", 1),
        ("b", "directory", "drwxr-xr-x", 0),
        ("b/x", "file", "-rw-r-----", 1),
    ]
