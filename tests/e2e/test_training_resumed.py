"""A training whose node dies is resumed on another node, and nobody who looks at its losses can tell.

What moved is printed: ``make training`` shows it, and docs/benchmarks.md quotes it.
"""

import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.units import format_size
from tests.support.mirror.backends import EMBEDDED
from tests.support.services.cluster import Cluster
from tests.support.services.commands import ROOT, Process, Shell, wait_until
from tests.support.services.services import metric
from tests.support.training.writers.reporting import digests
from tests.support.training.writing import LONGEST_SECONDS, Writer, needs_frameworks, writing

pytestmark = [*needs_frameworks]
RANKS = (0, 1)
STEPS, SAVE_EVERY = 50, 10
NEWEST = "sed 's/#rank-.*//' | sort -V | uniq -c | awk '$1 == 2 {print $2}' | tail -n 1"  # of docs/operations.md
BEFORE, AFTER = "bt://resumed@run-1", "bt://resumed@run-2"


@contextmanager
def training(folder: Path, *options: object, each: Sequence[Sequence[object]] = ((), ())) -> Iterator[list[Writer]]:
    """Both ranks, with options of ``each`` one's own."""
    folder.mkdir(parents=True)
    common = ("--ranks", len(RANKS), "--store", folder / "store", "--steps", STEPS, "--save-every", SAVE_EVERY)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                writing(folder / str(rank), "resumable", "--rank", rank, *common, *options, *each[rank])
            )
            for rank in RANKS
        ]


def losses(rank: Writer) -> dict[int, float]:
    return {one["step"]: one["loss"] for one in rank.said if "step" in one}


def job_of(job: str, rank: int) -> str:
    return f"{job}#rank-{rank}" if rank else job


def listed(shell: Shell, job: str) -> list[dict[str, Any]]:
    return list(shell.told("bdn", "checkpoints", "ls", job)["items"])


def chunks(folders: Iterable[Path]) -> dict[str, int]:
    """The distinct chunks of all files of some checkpoints, and their sizes in bytes."""
    contents = (path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file())
    parts = (one[start : start + CHUNK_SIZE] for one in contents for start in range(0, len(one), CHUNK_SIZE))
    return {digest_of(part).hex: len(part) for part in parts}


def size_of(folders: Iterable[Path]) -> int:
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


def whole(shell: Shell, job: str) -> list[str]:
    """The checkpoints that every rank pushed, oldest first."""
    names = [one["checkpoint_id"] for one in listed(shell, job)]
    return [name for name, count in Counter(names).items() if count == len(RANKS)]


@dataclass
class Node:
    """A machine: an agent, a directory for each rank, and a syncer for each."""

    shell: Shell
    agent: Process
    outs: list[Path]
    syncers: list[Process]

    @property
    def own_outs(self) -> list[tuple[object, ...]]:
        return [("--out", out) for out in self.outs]

    def kill(self) -> None:
        for one in (self.agent, *self.syncers):
            one.kill()


@contextmanager
def node(cluster: Cluster, name: str, job: str) -> Iterator[Node]:
    shell = cluster.shell(name)
    shell.root.mkdir()
    outs = [shell.root / f"rank-{rank}" for rank in RANKS]
    with ExitStack() as stack:
        agent = stack.enter_context(shell.running("bdn-node-agent"))
        cluster.await_agent(shell)
        syncers = []
        for rank, out in zip(RANKS, outs, strict=True):
            out.mkdir()
            words = ("bdn", "sync", str(out), job_of(job, rank), "--settle", "0s")  # what is renamed in is complete
            syncers.append(stack.enter_context(shell.running(*words)))
        yield Node(shell, agent, outs, syncers)


def until(ranks: Sequence[Writer], condition: Callable[[], object], what: str) -> None:
    """Raises where a rank failed."""
    wait_until(lambda: [one.has_ended() for one in ranks] and condition(), seconds=LONGEST_SECONDS, what=what)


def die_in_the_middle_of_a_save(node: Node, ranks: Sequence[Writer]) -> None:
    """After 40 steps, when the list has step 20 of both ranks, and step 30 of the first alone."""

    def go_on_when_listed(name: str, count: int) -> None:
        def names() -> list[str]:
            return [one["checkpoint_id"] for one in listed(node.shell, BEFORE)]

        until(ranks, lambda: names().count(name) == count, f"{name} in the list")
        for one in ranks:
            one.go_on()

    go_on_when_listed("step-10", 2)
    until(ranks, lambda: whole(node.shell, BEFORE) == ["step-10", "step-20"], "step-20 of both")
    node.syncers[1].kill()
    go_on_when_listed("step-20", 2)
    go_on_when_listed("step-30", 1)
    until(ranks, lambda: all({"hanging": 40} in one.said for one in ranks), "the middle of a save")
    for one in ranks:
        one.kill()
    node.kill()


def test_a_training_that_is_killed_with_its_node_goes_on_elsewhere_as_if_nothing_had_happened(
    backend: str, tmp_path: Path
) -> None:
    with training(tmp_path / "uninterrupted") as ranks:
        expected = [losses(one) for one in ranks if one.wait()]

    cluster = Cluster(tmp_path, {})
    with cluster.mirror(), cluster.http() as mirror:

        def moved(what: str) -> int:
            return int(metric(mirror, f"bdn_mirror_{what}_bytes_total"))

        with (
            node(cluster, "node-a", BEFORE) as first,
            training(tmp_path / "before", "--wait", "--hang-in", 40, each=first.own_outs) as ranks,
        ):
            die_in_the_middle_of_a_save(first, ranks)
            killed = [losses(one) for one in ranks]
        pushed = moved("pushed")
        sent = [first.outs[rank] / f"step-{step}" for rank, step in ((0, 10), (0, 20), (0, 30), (1, 10), (1, 20))]
        assert sum(chunks(sent).values()) <= pushed <= size_of(sent)

        with node(cluster, "node-b", AFTER) as second:
            *_, newest = whole(second.shell, BEFORE)
            assert newest == "step-20"
            names = second.shell.run("bdn", "checkpoints", "ls", BEFORE, "-q").out
            assert subprocess.check_output(["sh", "-c", NEWEST], input=names, text=True) == f"{BEFORE}/{newest}\n"
            assert f"bdn checkpoints ls bt://llama@run-1 -q | {NEWEST})" in (ROOT / "docs/operations.md").read_text()
            refused = second.shell.told("bdn", "stage", job_of(BEFORE, 1), "--job", "run-2", code=4)
            assert refused["error"]["code"] == "REVISION_NOT_FOUND"  # of the newest, step-30, there is no second rank
            served = moved("served")
            asked = [job_of(f"{BEFORE}/{newest}", rank) for rank in RANKS]
            mounts = [second.shell.told("bdn", "stage", one, "--job", "run-2")["mounts"][0] for one in asked]
            served = moved("served") - served
            staged = [Path(mount["path"]) for mount in mounts]
            assert [digests(path) for path in staged] == [digests(out / newest) for out in first.outs]
            read = sum(mount["bytes_from"]["mirror"] for mount in mounts)
            assert read == sum(chunks(staged).values())
            assert backend != EMBEDDED or served == read  # a bucket is read past the mirror

            own = [(*out, "--resume", path) for out, path in zip(second.own_outs, staged, strict=True)]
            with training(tmp_path / "after", each=own) as ranks:
                resumed = [losses(one) for one in ranks if one.wait()]
            again = ["step-30", "step-40", "step-50"]
            wait_until(lambda: whole(second.shell, AFTER) == again, LONGEST_SECONDS, "the last push")
        pushed_again = moved("pushed") - pushed
        sent_again = [out / name for out in second.outs for name in again]

    for rank in RANKS:
        assert list(resumed[rank]) == list(range(21, STEPS + 1))
        assert {step: loss for step, loss in killed[rank].items() if step <= 20} | resumed[rank] == expected[rank]
        assert killed[rank] == {step: expected[rank][step] for step in range(1, 41)}
        assert digests(second.outs[rank] / "step-30") == digests(first.outs[rank] / "step-30")
    new = chunks(sent_again).keys() - chunks(sent).keys()
    assert sum(chunks(sent_again)[one] for one in new) <= pushed_again <= size_of(sent_again)
    from_cache = sum(mount["bytes_from"]["node"] for mount in mounts)
    print(f"""
node-a: {len(sent)} checkpoints, {format_size(size_of(sent))}, of which {format_size(sum(chunks(sent).values()))} distinct
        sent to the mirror: {format_size(pushed)}
node-b: staged {len(staged)} ranks of {newest}, {format_size(size_of(staged))}
        read from the mirror: {format_size(read)}, from its own cache: {format_size(from_cache)}
        {len(sent_again)} checkpoints, {format_size(size_of(sent_again))}, of which new: {format_size(sum(chunks(sent_again)[one] for one in new))}
        sent to the mirror: {format_size(pushed_again)}""")
