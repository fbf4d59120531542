"""Checkpoints as real frameworks write them: listed whole or not at all, and loaded from what was pulled."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.services.cluster import Cluster
from tests.support.services.commands import Shell, wait_until
from tests.support.training.watching import Version, Watcher
from tests.support.training.writers.reporting import digests
from tests.support.training.writing import LONGEST_SECONDS, TORCHRUN, Writer, loaded, needs_frameworks, writing

pytestmark = [*needs_frameworks]
SETTLE = "6s"  # our writers pause for a second


@pytest.fixture(scope="module")
def node(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    cluster = Cluster(tmp_path_factory.mktemp("training"), {})
    with cluster.mirror(), cluster.agent() as shell:
        yield shell


@dataclass
class Job:
    """One that writes beside ``bdn sync`` and somebody who watches what becomes visible."""

    folder: Path
    writer: Writer
    watcher: Watcher

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def until_listed(self, name: str, versions: int = 1) -> Version:
        """Wait for so many versions of a checkpoint; the last of them."""
        self.watcher.until(self.writer, lambda: self.watcher.seen(name) >= versions, f"version {versions} of {name}")
        return next(one for one in reversed(self.watcher.versions) if one.name == name)

    def until_complete(self, name: str, times: int = 1) -> None:
        self.watcher.until(self.writer, lambda: len(self.writer.complete(name)) >= times, f"save {times} of {name}")

    def check(self, way: str) -> None:
        """Each version that was visible is a state that the writer called complete, and its framework loads that state."""
        states: list[str] = []
        for version in self.watcher.versions:
            written = digests(version.folder)
            matching = [one["state"] for one in self.writer.complete(version.name) if one["files"] == written]
            assert matching, f"{version.name} was listed half-written, as {sorted(written)}"
            states.append(matching[0])
        assert loaded(self.folder, way, [one.folder for one in self.watcher.versions]) == states


@contextmanager
def job(node: Shell, folder: Path, name: str, script: str, *arguments: object, ranks: bool = False) -> Iterator[Job]:
    uri, out = f"bt://writers@{name}", folder / "out"
    out.mkdir()
    launcher = TORCHRUN if ranks else ()
    with (
        node.running("bdn", "sync", str(out), uri, "--settle", SETTLE),
        writing(folder, script, out, *arguments, launcher=launcher) as writer,
    ):
        yield Job(folder, writer, Watcher(node, uri, folder / "pulled"))


def test_a_model_in_shards_and_its_next_version_are_listed_whole(node: Shell, tmp_path: Path) -> None:
    with job(node, tmp_path, "sharded", "sharded") as one:
        first = one.until_listed("step-1")
        one.until_listed("step-2")
        one.writer.go_on()
        second = one.until_listed("step-1", versions=2)
        assert one.writer.wait()
    assert first.listed["checkpoint_type"] == second.listed["checkpoint_type"] == "full"
    assert first.listed["manifest"] != second.listed["manifest"]
    assert len(list(first.folder.glob("model-*-of-*.safetensors"))) > 3
    assert (first.folder / "model.safetensors.index.json").exists()
    assert len(one.watcher.versions) == 3
    one.check("sharded")


def test_a_trainer_that_rotates_its_checkpoints_leaves_all_that_had_settled(node: Shell, tmp_path: Path) -> None:
    quick, awaited = (1, 2, 3), (4, 5, 6)
    with job(node, tmp_path, "trainer", "trainer", len(quick + awaited)) as one:
        for _ in quick:  # these are rotated away as fast as they come
            one.writer.go_on()
        for step in awaited:
            one.until_listed(f"checkpoint-{step}")
            one.writer.go_on()
        one.writer.wait()
        one.watcher.look()
        assert sorted(path.name for path in one.out.iterdir()) == ["checkpoint-5", "checkpoint-6"]
    listed = [found["checkpoint_id"] for found in one.watcher.listed()]
    assert listed[-3:] == [f"checkpoint-{step}" for step in awaited]
    assert {found["checkpoint_type"] for found in one.watcher.listed()} == {"full"}
    assert len(one.watcher.versions) == len(listed), "one was replaced by what was left of it"
    one.check("trainer")


def test_a_trainer_that_is_killed_in_the_middle_of_a_save_leaves_what_is_open(node: Shell, tmp_path: Path) -> None:
    out, uri = tmp_path / "out", "bt://writers@killed"
    with writing(tmp_path, "trainer", out, 2, "hanging") as writer:
        writer.go_on()
        wait_until(lambda: writer.has_ended() or {"hanging": 2} in writer.said, LONGEST_SECONDS, "the middle of a save")
        writer.kill()
    assert (out / "checkpoint-2/model.safetensors").exists()
    done = node.run("bdn", "sync", str(out), uri, "--once", "--json")
    assert (done.code, done.document["left"]) == (1, ["checkpoint-2"])
    assert [one["source"] for one in done.document["pushed"]] == [f"{uri}/checkpoint-1"]
    assert digests(out / "checkpoint-1") == writer.complete("checkpoint-1")[0]["files"]


def test_what_four_ranks_write_into_one_folder_is_listed_with_its_hidden_metadata(node: Shell, tmp_path: Path) -> None:
    with job(node, tmp_path, "distributed", "distributed", ranks=True) as one:
        first = one.until_listed("step-1")
        one.until_listed("step-2")
        one.writer.go_on()
        one.until_listed("step-1", versions=2)
        one.writer.wait()
    assert first.listed["checkpoint_type"] == "other"
    assert sorted(digests(first.folder)) == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4))]
    assert len(one.watcher.versions) == 3
    one.check("distributed")


def test_an_adapter_is_listed_with_its_base_model_and_its_configuration(node: Shell, tmp_path: Path) -> None:
    with job(node, tmp_path, "adapter", "adapter") as one:
        found = one.until_listed("adapter-1").listed
        one.writer.wait()
    assert (found["checkpoint_type"], found["base_model"]) == ("lora", "acme/tiny-gpt2")
    configuration = found["lora_adapter_config"]
    assert (configuration["peft_type"], configuration["r"], configuration["target_modules"]) == ("LORA", 4, ["c_attn"])
    one.check("adapter")
