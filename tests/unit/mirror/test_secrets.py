"""Where a secret's value comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from bdn.core.errors import SecretMalformedError, SecretNotFoundError
from bdn.mirror.secrets import Secrets


def test_the_environment_comes_before_the_directory(tmp_path: Path) -> None:
    (tmp_path / "hf-token").write_text("from a file\n")
    (tmp_path / "other").write_text("other")
    secrets = Secrets(tmp_path, {"BDN_SECRET_HF_TOKEN": "from the environment"})
    assert secrets.resolve("hf-token").value == "from the environment"
    assert secrets.resolve("other").value == "other"
    assert Secrets(tmp_path, {}).resolve("hf-token").value == "from a file\n"


def test_a_name_is_looked_up_as_written_before_its_upper_case_form() -> None:
    secrets = Secrets(None, {"BDN_SECRET_team.key": "exact", "BDN_SECRET_TEAM_KEY": "upper"})
    assert secrets.resolve("team.key").value == "exact"
    assert secrets.resolve("Team.Key").value == "upper"


@pytest.mark.parametrize("name", ["../passwd", "a/b", "", ".hidden", "a\0b", "x" * 200, "nowhere", "folder"])
def test_what_is_no_name_or_names_nothing_is_not_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path.parent / "passwd").write_text("x")
    with pytest.raises(SecretNotFoundError) as raised:
        Secrets(tmp_path, {}).resolve(name)
    assert raised.value.code == "SECRET_NOT_FOUND"


def test_an_empty_variable_is_no_secret_and_a_binary_file_is_malformed(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(SecretNotFoundError):
        Secrets(None, {"BDN_SECRET_X": ""}).resolve("x")
    with pytest.raises(SecretMalformedError, match="'binary' is not text"):
        Secrets(tmp_path, {}).resolve("binary")


def test_a_value_is_in_no_repr() -> None:
    secrets = Secrets(None, {"BDN_SECRET_X": "sesame"})
    assert "sesame" not in repr(secrets) + repr(secrets.resolve("x"))
