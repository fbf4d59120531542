"""Where a secret's value comes from."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bdn.core.errors import SecretMalformedError, SecretNotFoundError
from bdn.mirror.upstream.secrets import Keyring, Secrets, SecretTable, new_key
from tests.support.mirror.service import database_under_test


@pytest.fixture
async def table(tmp_path: Path) -> AsyncIterator[SecretTable]:
    async with database_under_test(tmp_path) as database:
        yield SecretTable(database, Keyring.parse(new_key()))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "secrets"
    folder.mkdir()
    return folder


async def test_the_environment_comes_before_the_directory_and_the_directory_before_the_table(
    table: SecretTable, directory: Path
) -> None:
    for name in ("hf-token", "other", "third"):
        await table.set("default", name, "from the table")
    (directory / "hf-token").write_text("from a file\n")
    (directory / "other").write_text("other")
    secrets = Secrets(directory, table, {"BDN_SECRET_HF_TOKEN": "from the environment"})
    assert (await secrets.resolve("hf-token", "default")).value == "from the environment"
    assert (await secrets.resolve("other", "default")).value == "other"
    assert (await secrets.resolve("third", "default")).value == "from the table"
    assert (await Secrets(directory, table, {}).resolve("hf-token", "default")).value == "from a file\n"
    assert (await Secrets(None, table, {}).resolve("hf-token", "default")).value == "from the table"
    assert [await secrets.is_outranked(name) for name in ("hf-token", "other", "third")] == [True, True, False]


async def test_the_operator_s_secrets_serve_everybody_and_the_table_s_their_own_organisation(
    table: SecretTable, directory: Path
) -> None:
    (directory / "shared").write_text("shared")
    await table.set("red", "own", "of red")
    await table.set("blue", "own", "of blue")
    secrets = Secrets(directory, table, {})
    assert [(await secrets.resolve("shared", who)).value for who in ("red", "blue")] == ["shared", "shared"]
    assert [(await secrets.resolve("own", who)).value for who in ("red", "blue")] == ["of red", "of blue"]
    with pytest.raises(SecretNotFoundError):
        await secrets.resolve("own", "green")


async def test_a_name_is_looked_up_as_written_before_its_upper_case_form(table: SecretTable) -> None:
    secrets = Secrets(None, table, {"BDN_SECRET_team.key": "exact", "BDN_SECRET_TEAM_KEY": "upper"})
    assert (await secrets.resolve("team.key", "default")).value == "exact"
    assert (await secrets.resolve("Team.Key", "default")).value == "upper"


@pytest.mark.parametrize("name", ["../passwd", "a/b", "", ".hidden", "a\0b", "x" * 200, "nowhere", "folder"])
async def test_what_is_no_name_or_names_nothing_is_not_found(table: SecretTable, directory: Path, name: str) -> None:
    (directory / "folder").mkdir()
    (directory.parent / "passwd").write_text("x")
    with pytest.raises(SecretNotFoundError) as raised:
        await Secrets(directory, table, {}).resolve(name, "default")
    assert raised.value.code == "SECRET_NOT_FOUND"


async def test_a_secret_that_is_nowhere_names_all_three_places(table: SecretTable) -> None:
    with pytest.raises(SecretNotFoundError) as raised:
        await Secrets(None, table, {}).resolve("nowhere", "default")
    for place in ("bdn-admin secrets set nowhere", "BDN_SECRET_nowhere", "BDN_SECRETS_DIR"):
        assert place in str(raised.value)


async def test_an_empty_variable_is_no_secret_and_a_binary_file_is_malformed(
    table: SecretTable, directory: Path
) -> None:
    (directory / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(SecretNotFoundError):
        await Secrets(None, table, {"BDN_SECRET_X": ""}).resolve("x", "default")
    with pytest.raises(SecretMalformedError, match="'binary' is not text"):
        await Secrets(directory, table, {}).resolve("binary", "default")
    assert await Secrets(directory, table, {}).is_outranked("binary")


async def test_a_value_is_in_no_repr(table: SecretTable) -> None:
    await table.set("default", "y", "open")
    secrets = Secrets(None, table, {"BDN_SECRET_X": "sesame"})
    shown = repr(secrets) + repr(await secrets.resolve("x", "default")) + repr(await secrets.resolve("y", "default"))
    assert "sesame" not in shown
    assert "open" not in shown
