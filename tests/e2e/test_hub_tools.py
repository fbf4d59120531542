"""The recipes of docs/tools.md, as they are written there, against a staged repository, offline."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.doubles.hub import Hub
from tests.support.content.trees import tree
from tests.support.services.cluster import Cluster
from tests.support.services.commands import ROOT, Shell
from tests.support.training.writing import PYTHON, needs_frameworks, writing

PAGE = (ROOT / "docs/tools.md").read_text()
SAYS = {"transformers": "gpt2 [1]", "datasets": "2 True", "PyTorch": "28 29"}


def recipe(title: str, language: str) -> str:
    section = PAGE.partition(f"\n### {title}\n")[2].partition("\n### ")[0]
    (block,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return str(block)


@pytest.fixture
def node(tmp_path: Path, hub: Hub) -> Iterator[Shell]:
    cluster = Cluster(tmp_path / "services", {"HF_ENDPOINT": hub.url})
    cluster.root.mkdir()
    with cluster.mirror(), cluster.agent() as shell:
        yield shell


def cache_with(node: Shell, root: Path, *sources: str) -> Shell:
    """A user whose cache of the hub shows a stage of these sources, by links as the page says."""
    root.mkdir()
    mounts = [part for number in range(len(sources)) for part in ("--mount", f"/m{number}")]
    mirror = node.told("bdn", "mirror", *sources, *mounts, "--wait")["id"]
    for mount in node.told("bdn", "stage", mirror, "--job", "serve", "--view", "hub")["mounts"]:
        (root / Path(mount["path"]).name).symlink_to(mount["path"])
    return replace(node, extra={**node.extra, "HF_HUB_CACHE": str(root), "HF_HUB_DISABLE_UPDATE_CHECK": "1"}).executed()


def test_the_commands_of_the_page_run(node: Shell, hub: Hub, tmp_path: Path) -> None:
    hub.repo("org/model").commit({"config.json": b"{}", "a/empty.txt": b"", "model.safetensors": b"weights"})
    user = cache_with(node, tmp_path / "hub", "hf://org/model")

    for command in recipe("hf", "sh").splitlines():
        offline = {} if "verify" in command else {"HF_HUB_OFFLINE": "1"}
        done = replace(user, extra=user.extra | offline).run(*command.split())
        assert (done.code, "org/model" in done.out.replace("models--org--model", "org/model")) == (0, True), done


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model as a framework writes it."""
    folder = tmp_path_factory.mktemp("published")
    with writing(folder, "published", folder / "model") as writer:
        writer.wait()
    return tree(folder / "model")


@pytest.mark.parametrize("title", [pytest.param(title, marks=[*needs_frameworks]) for title in SAYS], ids=list(SAYS))
def test_a_recipe_of_the_page_runs_offline(
    published: dict[str, bytes], node: Shell, hub: Hub, tmp_path: Path, title: str
) -> None:
    hub.repo("org/model").commit(published)
    hub.repo("org/data", kind="dataset").commit({"data/train.csv": b"a,b\n1,2\n3,4\n"})
    user = cache_with(node, tmp_path / "hub", "hf://org/model", "hf://datasets/org/data")

    done = subprocess.run(
        [str(PYTHON), "-c", recipe(title, "python")],
        env={"HOME": str(tmp_path), "HF_HUB_CACHE": user.extra["HF_HUB_CACHE"], "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout.strip().splitlines()[-1:]) == (0, [SAYS[title]]), done.stderr
