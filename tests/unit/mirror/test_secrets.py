"""Where a secret's value comes from, what opens a sealed one and what does not, and that nothing shows a value or a key."""

import subprocess
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from bdn.core.errors import InvalidRequestError, SecretMalformedError, SecretNotFoundError
from bdn.mirror.app import open_mirror
from bdn.mirror.chunks.opening import check_secret_files
from bdn.mirror.db.secrets import Keyring, SecretTable, new_key
from bdn.mirror.settings import MirrorSettings
from bdn.mirror.upstream.sign_ins import OperatorSecrets, Secrets, infrastructure_secret
from bdn.settings import SettingsError
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
    secrets = Secrets(OperatorSecrets(directory, {"BDN_SECRET_HF_TOKEN": "from the environment"}), table)
    assert (await secrets.resolve("hf-token", "default")).value == "from the environment"
    assert (await secrets.resolve("other", "default")).value == "other"
    assert (await secrets.resolve("third", "default")).value == "from the table"
    assert (
        await Secrets(OperatorSecrets(directory, {}), table).resolve("hf-token", "default")
    ).value == "from a file\n"
    assert (await Secrets(OperatorSecrets(None, {}), table).resolve("hf-token", "default")).value == "from the table"
    assert [await secrets.is_outranked(name, "default") for name in ("hf-token", "other", "third")] == [
        True,
        True,
        False,
    ]


async def test_operator_secrets__serve_the_default_and_listed_organisations__table_secrets_their_own(
    table: SecretTable, directory: Path
) -> None:
    (directory / "shared").write_text("shared")
    (directory / "binary").write_bytes(b"\xff")
    for who in ("red", "blue"):
        await table.set(who, "own", f"of {who}")
        await table.set(who, "shared", f"of {who}")
    served = MirrorSettings(secrets_organisations="red, pink").served_organisations
    secrets = Secrets(OperatorSecrets(directory, {}), table, served)
    values = [(await secrets.resolve("shared", who)).value for who in ("default", "red", "pink", "blue")]
    assert values == ["shared", "shared", "shared", "of blue"]
    assert [(await secrets.resolve("own", who)).value for who in ("red", "blue")] == ["of red", "of blue"]
    assert [await secrets.is_outranked("shared", who) for who in ("default", "red", "blue")] == [True, True, False]
    assert [await secrets.is_outranked("binary", who) for who in ("red", "blue")] == [True, False]
    for name, who in (("own", "green"), ("shared", "green"), ("binary", "green")):
        with pytest.raises(SecretNotFoundError):
            await secrets.resolve(name, who)


async def test_infrastructure_secret__comes_from_a_name_space_of_its_own(
    table: SecretTable, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = partial(infrastructure_secret, directory, "BDN_STORE_SECRET")
    monkeypatch.setenv("BDN_SECRET_STORE", "of sources")
    (directory / "store").write_text("of sources")
    with pytest.raises(InvalidRequestError) as raised:
        await resolve("store")
    for place in (
        "BDN_STORE_SECRET=store",
        "BDN_INFRASTRUCTURE_SECRET_store",
        "infrastructure/store in BDN_SECRETS_DIR",
    ):
        assert place in str(raised.value)
    (directory / "infrastructure").mkdir()
    (directory / "infrastructure" / "store").write_text("of the file")
    assert (await resolve("store")).value == "of the file"
    monkeypatch.setenv("BDN_INFRASTRUCTURE_SECRET_STORE", "of the environment")
    assert (await resolve("store")).value == "of the environment"
    secrets = Secrets(OperatorSecrets(directory), table)
    assert (await secrets.resolve("store", "default")).value == "of sources"
    for name in ("infrastructure", "infrastructure/store", "../infrastructure/store"):
        with pytest.raises(SecretNotFoundError):
            await secrets.resolve(name, "default")


@pytest.mark.parametrize("setting", ["tls_key", "grant_key_file", "identity_key_file", "data_dir"])
def test_file_of_the_mirror_in_the_directory_of_secrets__is_refused(setting: str, directory: Path) -> None:
    link = directory.parent / "link"
    link.symlink_to(directory)
    path = link if setting == "data_dir" else link / "key.pem"
    with pytest.raises(InvalidRequestError, match=f"BDN_{setting.upper()}={path}.*BDN_SECRETS_DIR"):
        check_secret_files(MirrorSettings.model_validate({"secrets_dir": directory, setting: path}))
    beside = directory / "infrastructure" / path.name
    check_secret_files(MirrorSettings.model_validate({"secrets_dir": directory, setting: beside}))


async def test_mirror__with_its_configuration_file_in_the_directory_of_secrets__does_not_start(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "bdn.toml").write_text("")
    monkeypatch.setenv("BDN_CONFIG", str(directory / "bdn.toml"))
    with pytest.raises(InvalidRequestError, match="BDN_CONFIG="):
        async with open_mirror(MirrorSettings(data_dir=directory.parent / "mirror", secrets_dir=directory)):
            pass


def test_organisation_that_operator_secrets_serve__is_checked() -> None:
    with pytest.raises(SettingsError, match=r"'a:b' cannot be the name of an organisation"):
        MirrorSettings(secrets_organisations="red,a:b")


async def test_a_name_is_looked_up_as_written_before_its_upper_case_form(table: SecretTable) -> None:
    secrets = Secrets(OperatorSecrets(None, {"BDN_SECRET_team.key": "exact", "BDN_SECRET_TEAM_KEY": "upper"}), table)
    assert (await secrets.resolve("team.key", "default")).value == "exact"
    assert (await secrets.resolve("Team.Key", "default")).value == "upper"


@pytest.mark.parametrize("name", ["../passwd", "a/b", "", ".hidden", "a\0b", "x" * 200, "nowhere", "folder"])
async def test_what_is_no_name_or_names_nothing_is_not_found(table: SecretTable, directory: Path, name: str) -> None:
    (directory / "folder").mkdir()
    (directory.parent / "passwd").write_text("x")
    with pytest.raises(SecretNotFoundError) as raised:
        await Secrets(OperatorSecrets(directory, {}), table).resolve(name, "default")
    for place in (f"bdn-admin secrets set {name}", f"BDN_SECRET_{name}", "BDN_SECRETS_DIR"):
        assert place in str(raised.value)


async def test_an_empty_variable_is_no_secret_and_a_binary_file_is_malformed(
    table: SecretTable, directory: Path
) -> None:
    (directory / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(SecretNotFoundError):
        await Secrets(OperatorSecrets(None, {"BDN_SECRET_X": ""}), table).resolve("x", "default")
    with pytest.raises(SecretMalformedError, match="'binary' is not text"):
        await Secrets(OperatorSecrets(directory, {}), table).resolve("binary", "default")
    assert await Secrets(OperatorSecrets(directory, {}), table).is_outranked("binary", "default")


async def test_a_value_is_in_no_repr(table: SecretTable) -> None:
    await table.set("default", "y", "open")
    secrets = Secrets(OperatorSecrets(None, {"BDN_SECRET_X": "sesame"}), table)
    shown = repr((secrets, await secrets.resolve("x", "default"), await secrets.resolve("y", "default")))
    for hidden in ("sesame", "open", repr(table.keyring.keys[0])[2:-1]):
        assert hidden not in shown


# --- sealed ---

OLD, NEW = new_key(), new_key()
VALUE = "hf_séame"
KEYRING = Keyring.parse(NEW)


def test_what_was_sealed_opens_again_and_looks_different_every_time() -> None:
    assert NEW not in repr(KEYRING)
    sealed = [KEYRING.seal("default", "name", VALUE) for _ in range(2)]
    assert [KEYRING.open("default", "name", each) for each in sealed] == [VALUE, VALUE]
    assert sealed[0] != sealed[1]
    assert VALUE.encode() not in sealed[0]


def test_a_value_opens_under_its_own_name_and_organisation_alone() -> None:
    sealed = KEYRING.seal("default", "name", VALUE)
    for organisation, name in (("default", "other"), ("other", "name"), ('default", "name', ""), ("", "defaultname")):
        with pytest.raises(SecretMalformedError, match="made for another name or organisation"):
            KEYRING.open(organisation, name, sealed)


def test_every_changed_byte_is_noticed() -> None:
    sealed = KEYRING.seal("default", "name", VALUE)
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 1
        with pytest.raises(SecretMalformedError):
            KEYRING.open("default", "name", bytes(changed))
    for length in (0, 5, 9, 20, 21, len(sealed) - 1):
        with pytest.raises(SecretMalformedError):
            KEYRING.open("default", "name", sealed[:length])


def test_all_keys_open_and_the_first_one_seals() -> None:
    sealed = Keyring.parse(OLD).seal("default", "name", VALUE)
    both = Keyring.parse(f" {NEW} , {OLD} ,")
    assert both.open("default", "name", sealed) == VALUE
    assert both.sealed_with(sealed) == "older key"
    assert both.sealed_with(both.seal("default", "name", VALUE)) == "first key"
    assert KEYRING.open("default", "name", both.seal("default", "name", VALUE)) == VALUE
    assert KEYRING.sealed_with(sealed) == Keyring().sealed_with(sealed) == "unknown key"


def test_without_the_right_key_the_error_says_what_to_do() -> None:
    sealed = Keyring.parse(OLD).seal("default", "name", VALUE)
    with pytest.raises(
        SecretMalformedError, match="not one of the keys in the mirror's BDN_SECRETS_KEY; add that key to it, or"
    ):
        KEYRING.open("default", "name", sealed)
    with pytest.raises(SecretMalformedError, match="has to be in the mirror's BDN_SECRETS_KEY") as raised:
        Keyring.parse(None).open("default", "name", sealed)
    assert "bdn-admin secrets set name" in str(raised.value)
    for empty in (None, "", " , "):
        with pytest.raises(InvalidRequestError, match=r"'bdn-admin secrets new-key', set it as BDN_SECRETS_KEY"):
            Keyring.parse(empty).seal("default", "name", VALUE)


@pytest.mark.parametrize(
    "wrong",
    ["sesame", "c2VzYW1l", "A" * 40, "A" * 43 + "=" + "A" * 43 + "=", "é" * 32, "A" * 43 + "=!", "!" + "A" * 43],
)
def test_a_key_of_the_wrong_form_is_refused_by_its_place_and_not_shown(wrong: str) -> None:
    with pytest.raises(InvalidRequestError, match="key 2 is not 32 bytes in base64") as raised:
        Keyring.parse(f"{NEW},{wrong}")
    assert wrong not in str(raised.value)
    assert raised.value.__cause__ is None


def test_a_key_that_openssl_made_is_a_key() -> None:
    made = subprocess.run(["openssl", "rand", "-base64", "32"], capture_output=True, text=True, check=True).stdout
    keyring = Keyring.parse(made)
    assert keyring.open("o", "n", keyring.seal("o", "n", VALUE)) == VALUE
    assert Keyring.parse("+/" * 21 + "+=").keys == Keyring.parse("-_" * 21 + "-=").keys  # both alphabets
