"""``bdn pull`` of what stands at its directory already: it is looked at without opening a mirror or an agent."""

import subprocess
import sys
from typing import Any

import pytest

from tests.doubles.faults import drop
from tests.doubles.hub import Hub
from tests.support.content.trees import tree
from tests.support.services.commands import Finished, Shell

pytestmark = pytest.mark.embedded("what was pulled is looked up in SQLite")
FILES = {"config.json": b"{}", "nested/model.bin": bytes(range(256)) * 5_000, "README.md": b"# hello\n"}
OF_SERVICES = {
    "sqlalchemy",
    "fastapi",
    "uvicorn",
    "huggingface_hub",
    "aiobotocore",
    "httpx2",
    "cryptography",
    "rich",
    "tqdm",
    "yaml",
    "bdn.transfer.byte_threads",
}
IN_FULL = (
    "sqlite:///{data}/mirror.sqlite"  # a database that is named, even if it is the usual one, is opened by a mirror
)
SCRIPT = """
import atexit, sys
from bdn.cli.main import main
atexit.register(lambda: print(*sys.modules, file=open("modules", "w")))
main()
"""


def pull(shell: Shell, *arguments: str) -> tuple[Finished, set[str]]:
    """A pull in a process of its own, and the modules that it has imported."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "pull", *arguments, "--json"],
        check=False, env=shell.environment, cwd=shell.root, capture_output=True, text=True,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout, done.stderr), set((shell.root / "modules").read_text().split())


def said(done: Finished) -> dict[str, Any]:
    assert done.code == 0, done.err
    return {name: value for name, value in done.document.items() if name != "seconds"}


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("hf://org/model@{sha}", ()),
        ("hf://org/model@{sha}", ("--link",)),
        ("hf://org/model@{sha}", ("--allow", "*.md", "--allow", "**/*.bin", "--ignore", "*.json")),
        ("hf://org/model", ("--offline",)),
    ],
    ids=["commit", "linked", "patterns", "offline"],
)
def test_a_second_pull_imports_no_service_and_says_what_the_full_path_says(
    shell: Shell, hub: Hub, source: str, options: tuple[str, ...]
) -> None:
    sha = hub.repo("org/model").commit(FILES)
    source, first = source.format(sha=sha), [option for option in options if option != "--offline"]
    said(shell.run("bdn", "pull", source, "out", *first, "--json"))
    hub.log.clear()
    before = tree(shell.root / "out")

    again, modules = pull(shell, source, "out", *options)
    full = shell.run("bdn", "pull", source, "out", *options, "--json", BDN_DATABASE_URL=IN_FULL.format(data=shell.data))

    assert said(again) == said(full)
    assert again.err == "".join(line for line in full.err.splitlines(keepends=True) if not line.startswith("staging"))
    assert "bdn.cli.pull" in modules
    assert not OF_SERVICES & modules
    assert hub.log.count() == 0
    assert tree(shell.root / "out") == before


@pytest.mark.parametrize("source", ["hf://org/model", "hf://org/model@main"])
def test_an_unchanged_branch_is_asked_for_without_a_mirror_and_a_changed_one_is_mirrored(
    shell: Shell, hub: Hub, source: str
) -> None:
    repository = hub.repo("org/model")
    repository.commit(FILES)
    said(shell.run("bdn", "pull", source, "out", "--json"))
    hub.log.clear()

    again, modules = pull(shell, source, "out")
    asked = hub.log.count()
    full = shell.run("bdn", "pull", source, "out", "--json", BDN_DATABASE_URL=IN_FULL.format(data=shell.data))
    assert said(again) == said(full)
    assert not OF_SERVICES & modules
    assert asked == 1

    new = repository.commit({"README.md": b"# new\n"})
    changed, _ = pull(shell, source, "out")
    assert said(changed)["resolved_revision"] == new
    assert tree(shell.root / "out") == {**FILES, "README.md": b"# new\n"}

    hub.fail(drop(), times=None)
    away, _ = pull(shell, source, "out")
    assert (away.code, away.document["error"]["code"]) == (1, "UPSTREAM_UNAVAILABLE"), away.out
    assert f"at {new}, as mirrored" in away.err
