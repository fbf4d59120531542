"""The keys of grants: which file they come from, what it must be, and how they are changed without killing a grant."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bdn.core.chunk import digest_of
from bdn.core.errors import InvalidRequestError
from bdn.mirror.access.key_files import load_grant_signer
from bdn.mirror.settings import MirrorSettings
from bdn.mirror.upstream.issuer import new_identity_key
from bdn.wire.grants import Grant, GrantedMount, GrantSigner, GrantVerifier, new_signing_key
from tests.support.mirror.backends import write_keys

OLD, NEW = new_signing_key(), new_signing_key()
GRANT = Grant("org", (GrantedMount("/m", digest_of(b"m"), "hf://org/model"),), 2000.0)
POSTGRES: dict[str, Any] = {"database_url": "postgresql+asyncpg://db/bdn"}


def loaded(data_dir: Path, file: Path | None = None, **settings: Any) -> GrantSigner:
    return load_grant_signer(MirrorSettings(data_dir=data_dir, grant_key_file=file, **settings))


def test_a_key_is_changed_without_a_moment_in_which_grants_are_refused(tmp_path: Path) -> None:
    # The new key is known everywhere, then it signs, then the old one goes: replicas of two steps accept each other's grants.
    steps = [(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]
    signers = [loaded(tmp_path, write_keys(tmp_path / f"{number}.pem", *keys)) for number, keys in enumerate(steps)]
    for before, now in pairwise(signers):
        for signer, verifier in ((before, now), (now, before)):
            assert GrantVerifier(verifier.public_keys).verify(signer.sign(GRANT), now=1000.0) == GRANT
    assert signers[1].public_keys == signers[2].public_keys  # agents do not swap keys with each heartbeat
    assert signers[1].key_id == signers[0].key_id != signers[2].key_id == signers[3].key_id


def test_without_a_file_one_machine_makes_its_own_key_and_keeps_it(tmp_path: Path) -> None:
    first = loaded(tmp_path)
    assert loaded(tmp_path).public_keys == first.public_keys
    assert [(file.name, file.stat().st_mode & 0o777) for file in tmp_path.iterdir()] == [("grant-key.pem", 0o600)]
    given = loaded(tmp_path, write_keys(tmp_path / "keys.pem", NEW, (tmp_path / "grant-key.pem").read_bytes(), NEW))
    assert [given.key_id, len(given.public_keys)] == [GrantSigner(NEW).key_id, 2]
    GrantVerifier(given.public_keys).verify(first.sign(GRANT), now=1000.0)


def test_with_postgresql_all_processes_need_the_same_file_and_are_told_which_key_they_had(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"BDN_GRANT_KEY_FILE .*openssl genpkey -algorithm ed25519"):
        loaded(tmp_path, **POSTGRES)
    assert list(tmp_path.iterdir()) == []
    own = write_keys(tmp_path / "grant-key.pem", OLD)  # as every process made one before
    with pytest.raises(InvalidRequestError, match=f"Until now this process used {own}"):
        loaded(tmp_path, **POSTGRES)
    assert loaded(tmp_path, own, **POSTGRES).key_id == GrantSigner(OLD).key_id


def sealed() -> bytes:
    key = serialization.load_pem_private_key(OLD, password=None)
    assert isinstance(key, Ed25519PrivateKey)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"word")
    )


BAD = {
    "nothing": (b"", "holds no private key"),
    "text": (b"to be done", "holds no private key"),
    "a public key": (b"-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----\n", "holds no private key"),
    "a broken one": (b"-----BEGIN PRIVATE KEY-----\nc2VzYW1l\n-----END PRIVATE KEY-----\n", "cannot be read"),
    "the second broken": (
        OLD + b"-----BEGIN PRIVATE KEY-----\nc2VzYW1l\n-----END PRIVATE KEY-----\n",
        "cannot be read",
    ),
    "the first cut off": (OLD[:60] + b"\n" + NEW, "cut off"),
    "the last cut off": (OLD + NEW[:60], "cut off"),
    "a password": (sealed(), "cannot be read"),
    "RSA": (new_identity_key(), "not Ed25519"),
}


@pytest.mark.parametrize("own", [False, True], ids=["given", "own"])
def test_a_file_that_holds_something_else_is_refused_with_what_to_do(tmp_path: Path, own: bool) -> None:
    for what, (content, problem) in BAD.items():
        file = write_keys(tmp_path / "grant-key.pem", content)
        with pytest.raises(InvalidRequestError) as caught:
            loaded(tmp_path, None if own else file)
        for told in ("BDN_GRANT_KEY_FILE", str(file), problem, "openssl genpkey"):
            assert told in str(caught.value), what
        assert "c2VzYW1l" not in str(caught.value)


def test_a_file_that_is_absent_no_file_or_open_to_everybody_is_refused(tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys.pem", OLD)
    for path in (tmp_path / "absent.pem", tmp_path, file / "below"):
        with pytest.raises(InvalidRequestError, match=f"BDN_GRANT_KEY_FILE: {path} cannot be read: "):
            loaded(tmp_path, path)
    for mode in (0o604, 0o666, 0o602):
        file.chmod(mode)
        with pytest.raises(InvalidRequestError, match=r"every user of this machine can read .*chmod o= .*defaultMode"):
            loaded(tmp_path, file)
    file.chmod(0o440)  # a group's: how Kubernetes gives a secret to who is not root
    loaded(tmp_path, file)
