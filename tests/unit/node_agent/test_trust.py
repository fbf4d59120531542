from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from bdn.core.chunk import digest_of
from bdn.core.errors import DiskFailedError, InternalError
from bdn.wire.grants import Grant, GrantedMount, GrantSigner, UnknownKeyError, new_signing_key
from bdn.wire.shapes import ServiceUnreachableError
from node_agent.trust import Trust
from tests.fakes.clock import Clock

SIGNER = GrantSigner(new_signing_key())
GRANT = Grant("org", (GrantedMount("/m", digest_of(b"m"), "hf://org/model"),), 2000.0)


async def unanswered() -> None:
    raise ServiceUnreachableError("http://mirror", "it is down")


def trust_at(path: Path, clock: Clock, ask: Callable[[], Awaitable[None]] = unanswered) -> Trust:
    trust = Trust(path / "keys.json", clock, ask)
    trust.load()
    return trust


def test_keys_are_believed_once_they_came_and_after_a_restart(tmp_path: Path) -> None:
    clock, token = Clock(1000.0), SIGNER.sign(GRANT)
    trust = trust_at(tmp_path, clock)
    with pytest.raises(UnknownKeyError):
        trust.verify(token)

    trust.update(SIGNER.public_keys)

    assert trust.verify(token) == GRANT
    assert trust_at(tmp_path, clock).verify(token) == GRANT


def test_keys_that_are_withdrawn_are_not_believed_any_more(tmp_path: Path) -> None:
    trust, other = trust_at(tmp_path, Clock(1000.0)), GrantSigner(new_signing_key())
    trust.update(SIGNER.public_keys)
    trust.verify(SIGNER.sign(GRANT))

    trust.update(other.public_keys)

    with pytest.raises(UnknownKeyError):
        trust.verify(SIGNER.sign(GRANT))


def test_an_answer_without_usable_keys_changes_nothing(tmp_path: Path) -> None:
    trust = trust_at(tmp_path, Clock(1000.0))
    trust.update(SIGNER.public_keys)

    trust.update([])
    with pytest.raises(InternalError):
        trust.update([{"kid": "x", "kty": "nonsense"}])

    trust.verify(SIGNER.sign(GRANT))


def test_a_damaged_file_of_keys_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("{")

    with pytest.raises(UnknownKeyError):
        trust_at(tmp_path, Clock()).verify(SIGNER.sign(GRANT))


def test_keys_that_cannot_be_kept_are_believed_until_the_next_start(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    trust = trust_at(tmp_path / "absent", clock)

    with pytest.raises(DiskFailedError):
        trust.update(SIGNER.public_keys)

    assert trust.verify(SIGNER.sign(GRANT)) == GRANT
    with pytest.raises(UnknownKeyError):
        trust_at(tmp_path / "absent", clock).verify(SIGNER.sign(GRANT))


async def test_check__asks_the_mirror_for_a_key_that_is_not_known(tmp_path: Path) -> None:
    asked: list[None] = []

    async def ask() -> None:
        asked.append(None)
        trust.update(SIGNER.public_keys)

    trust = trust_at(tmp_path, Clock(1000.0), ask)

    assert [await trust.check(SIGNER.sign(GRANT)) for _ in range(2)] == [GRANT, GRANT]
    assert asked == [None]


async def test_check__says_that_the_key_is_unknown_while_the_mirror_is_down(tmp_path: Path) -> None:
    with pytest.raises(UnknownKeyError):
        await trust_at(tmp_path, Clock(1000.0)).check(SIGNER.sign(GRANT))
