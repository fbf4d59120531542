"""What ``bdn-admin verify`` takes for a path, and what it refuses to mix."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bdn.cli.admin import main
from bdn.cli.verify import is_path


@pytest.mark.parametrize("what", ["/mnt/models/llama", "./model", "../model", "."])
def test_what_begins_like_a_path_is_one(what: str) -> None:
    assert is_path(what)


def test_a_file_that_is_there_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert is_path("model")
    assert not is_path("other")


@pytest.mark.parametrize("what", ["hf://org/model", "s3://bucket/prefix", f"b3:{'0' * 64}"])
def test_sources_and_manifests_are_no_paths(what: str) -> None:
    assert not is_path(what)


@pytest.mark.parametrize("arguments", [[], ["hf://org/model", "--all"], ["/mnt/model", "--tier", "node"]])
def test_what_does_not_go_together_is_a_matter_of_usage(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, ["verify", *arguments]).exit_code == 2
