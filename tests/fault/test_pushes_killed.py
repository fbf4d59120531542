"""Whoever pushes and the mirror that takes it, killed at any moment: nothing in part is ever seen, and little is sent twice."""

import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random

import pytest

from bdn.core.chunk import CHUNK_SIZE
from tests.support.content.trees import tree
from tests.support.promises.tally import at_scale
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Process, Shell, wait_until

pytestmark = pytest.mark.production  # that make fault takes it; it is about SQLite, which is opened here
JOB = "bt://llama@train-42"
CHUNKS = 12
STREAMS = 8  # threads of a pusher, each with one chunk on its way
KILLS = at_scale(4, 200)
_LONGEST_SECONDS = 300


class Crashes:
    """A mirror that is started again whenever it was killed."""

    def __init__(self, root: Path) -> None:
        self.cluster = Cluster(root, {})
        self.shell: Shell = self.cluster.shell()
        self.shell.root.mkdir(parents=True)

    def rows(self, query: str) -> list[tuple[object, ...]]:
        database = self.cluster.root / "mirror/data/mirror.sqlite"
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=60)) as connection:
            return connection.execute(query).fetchall()

    def sent(self) -> int:
        """Chunks that the mirror has recorded."""
        return int(str(self.rows("SELECT count(*) FROM contents")[0][0]))

    def sync(self, folder: Path, random: Random, kills: int) -> int:
        """Push a folder once, whoever is killed meanwhile; how often somebody was."""
        killed = 0
        while True:
            with ExitStack() as stack:
                mirror = stack.enter_context(self.cluster.mirror())
                pusher = stack.enter_context(self.shell.running("bdn", "sync", str(folder), JOB, "--once"))
                if killed == kills:
                    assert pusher.wait(_LONGEST_SECONDS) == 0
                    return killed
                self._await(pusher, self.sent() + random.randint(0, 4))
                victim = random.choice([mirror, pusher])
                victim.kill()
                victim.wait()
                killed += 1

    def _await(self, pusher: Process, count: int) -> None:
        """Some of it is recorded by now, or all was."""
        wait_until(lambda: pusher.poll() is not None or self.sent() >= count, seconds=_LONGEST_SECONDS)


def test_pusher_and_mirror_killed_again_and_again_leave_whole_checkpoints_alone(tmp_path: Path) -> None:
    random, crashes, folder = Random(20261125), Crashes(tmp_path / "cluster"), tmp_path / "job"
    written: dict[str, dict[str, bytes]] = {}
    left, kills, unique, extra = KILLS, 0, 0, 0
    while left:
        of_this = min(left, 4)
        left -= of_this
        name = f"checkpoint-{len(written)}"
        weights = random.randbytes(CHUNKS * CHUNK_SIZE + 5)
        written[name] = {"model.safetensors": weights, "config.json": name.encode(), "empty": b""}
        for path, content in written[name].items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_bytes(content)
        kills += crashes.sync(folder, random, of_this)
        unique += sum(map(len, written[name].values()))
        with crashes.cluster.mirror(), crashes.cluster.agent(f"node-{len(written)}") as node:
            seen = node.run("bdn", "checkpoints", "ls", "--json").document["items"]
            assert [one["source"] for one in seen] == [f"{JOB}/{one}" for one in written]
            done = node.run("bdn", "checkpoints", "pull", f"{JOB}/{name}", str(tmp_path / "pulled" / name))
            assert done.code == 0, done.err
            assert tree(tmp_path / "pulled" / name) == written[name]
        (extra,) = crashes.rows("SELECT sum(bytes_transferred) FROM mirror_sources")[0]  # type: ignore[assignment]
    assert kills == KILLS
    assert extra - unique <= kills * STREAMS * CHUNK_SIZE
    assert crashes.rows("SELECT DISTINCT status FROM mirrors") == [("READY",)]
    print(f"{kills} kills, {len(written)} checkpoints of {unique} bytes, {extra - unique} bytes sent twice")
