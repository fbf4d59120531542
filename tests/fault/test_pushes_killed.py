"""Whoever pushes and the mirror that takes it, killed at any moment: nothing in part is ever seen, and little is sent twice."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from random import Random

import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from tests.support.content.trees import tree
from tests.support.promises.tally import FULL, at_scale
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Process, Shell, wait_until

pytestmark = pytest.mark.production  # that make fault takes it; it is about SQLite, which is opened here
JOB = "bt://llama@train-42"
CHUNKS = 12
STREAMS = 8  # threads of a pusher, each with one chunk on its way
KILLS = at_scale(4, 200)
_LONGEST_SECONDS = 300


LARGE = 12  # checkpoints of 1 GiB, and a kill in the middle of each
SHARDS = 4
CHUNKS_OF_SHARD = 32
VICTIMS = {"agent": 65, "mirror": 35}  # so many of a hundred


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
        """Chunks that the mirror has."""
        return int(str(self.rows("SELECT count(*) FROM chunks WHERE state = 'stored'")[0][0]))

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

    @contextmanager
    def agent(self) -> Iterator[Process]:
        """An agent that has one volume for checkpoints; the same one after a kill."""
        shell = self.cluster.shell(BDN_AGENT_SETTLE_SECONDS="0", BDN_AGENT_KEEP_CHECKPOINT="false")
        with shell.running("bdn-node-agent") as process:
            wait_until(
                lambda: shell.run("bdn", "volumes", "ls", "--json").code == 0, _LONGEST_SECONDS, "the agent's answer"
            )
            yield process

    def listed(self) -> list[str]:
        with self.cluster.http() as http:
            return [one["source"] for one in http.get("/checkpoints").json()["items"]]

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


@pytest.mark.skipif(not FULL, reason="make fault: takes minutes")
def test_a_kill_in_each_checkpoint_of_1_gib_has_a_hundredth_sent_again(tmp_path: Path) -> None:
    random, crashes = Random(20261126), Crashes(tmp_path / "cluster")
    digests: dict[str, dict[str, Digest]] = {}
    unique = 0
    with ExitStack() as mirror, ExitStack() as agent:
        lives = {"mirror": mirror, "agent": agent}
        begin = {"mirror": crashes.cluster.mirror, "agent": crashes.agent}
        processes = {name: stack.enter_context(begin[name]()) for name, stack in lives.items()}
        words = ("--job", "train-42", "--project", "llama", "--checkpoints", "4GiB", "--scratch", "16MiB")
        made = crashes.shell.run("bdn", "volumes", "create", *words, "--json")
        assert made.code == 0, made.err
        folder = Path(made.document["environment"]["BT_CHECKPOINT_DIR"])
        for victim in random.choices(list(VICTIMS), list(VICTIMS.values()), k=LARGE):
            name, before = f"checkpoint-{len(digests)}", crashes.sent()
            digests[name] = _write(folder / f"tmp-{name}", random)
            unique += sum(path.stat().st_size for path in (folder / f"tmp-{name}").iterdir())
            (folder / f"tmp-{name}").rename(folder / name)
            part = random.randint(1, SHARDS * CHUNKS_OF_SHARD)
            wait_until(lambda: crashes.sent() >= before + part, _LONGEST_SECONDS)  # noqa: B023 - called here
            processes[victim].kill()
            lives[victim].close()
            processes[victim] = lives[victim].enter_context(begin[victim]())
            wait_until(lambda: f"{JOB}/{name}" in crashes.listed(), _LONGEST_SECONDS)  # noqa: B023 - called here
            shutil.rmtree(folder / name)
        for name, found in digests.items():
            pulled = tmp_path / "pulled"
            done = crashes.shell.run("bdn", "checkpoints", "pull", f"{JOB}/{name}", str(pulled))
            assert done.code == 0, done.err
            assert {path.name: digest_of(path.read_bytes()) for path in pulled.iterdir()} == found
            shutil.rmtree(pulled)
    ((recorded,),) = crashes.rows("SELECT sum(bytes_transferred) FROM mirror_sources")
    again = int(str(recorded)) - unique  # counted before they are stored
    print(f"{LARGE} kills, {LARGE} checkpoints of {unique} bytes, {again} bytes sent twice")
    assert 0 <= again <= unique / 100


def _write(folder: Path, random: Random) -> dict[str, Digest]:
    folder.mkdir()
    found: dict[str, Digest] = {}
    for number in range(SHARDS):
        content = b"".join(random.randbytes(CHUNK_SIZE) for _ in range(CHUNKS_OF_SHARD))
        (folder / f"model-{number}.safetensors").write_bytes(content)
        found[f"model-{number}.safetensors"] = digest_of(content)
    return found
