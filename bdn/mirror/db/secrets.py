"""The secrets of organisations in the database, encrypted with keys that are not in it."""

from __future__ import annotations

import json
import os
import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass, field
from typing import Final, Literal, Self

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import delete, select, update

from bdn.core.errors import InvalidRequestError, NotFoundError, SecretMalformedError
from bdn.mirror.db.database import Database, ReadSession, WriteSession, dialect_of, insert
from bdn.mirror.db.tables import SecretRow


@dataclass(frozen=True)
class SecretTable:
    """The secrets of all organisations. Each method but ``rotate_others`` acts for one organisation."""

    database: Database
    keyring: Keyring

    async def value(self, organisation: str, name: str) -> str | None:
        """The value now; None if there is none. Raises ``SecretMalformedError`` if it cannot be decrypted."""
        async with self.database.read() as session:
            row = await session.get(SecretRow, (organisation, name))
        return None if row is None else self.keyring.open(organisation, name, row.ciphertext)

    async def rows(self, organisation: str) -> list[SecretRow]:
        async with self.database.read() as session:
            return await _rows(session, organisation)

    async def set(self, organisation: str, name: str, value: str) -> SecretRow:
        now = time.time()
        changed = {"ciphertext": self.keyring.seal(organisation, name, value), "updated_at": now}
        async with self.database.write() as session:
            new = insert(dialect_of(session), SecretRow).values(
                organisation=organisation, name=name, created_at=now, **changed
            )
            await session.execute(new.on_conflict_do_update(index_elements=["organisation", "name"], set_=changed))
            return await session.get_one(SecretRow, (organisation, name))

    async def remove(self, organisation: str, name: str) -> None:
        found = delete(SecretRow).where(SecretRow.organisation == organisation, SecretRow.name == name)
        async with self.database.write() as session:
            if (await session.execute(found.returning(SecretRow.name))).first() is None:
                raise NotFoundError(f"secret {name!r}")

    async def rotate(self, organisation: str) -> None:
        """Encrypt all secrets of the organisation with the first key.

        Changes none if it raises ``SecretMalformedError``.
        """
        async with self.database.write() as session:
            for row in await _rows(session, organisation):
                await self.reseal(session, row)

    async def rotate_others(self, organisation: str) -> int:
        """Encrypt the secrets of all other organisations with the first key.

        Returns how many are left because they cannot be decrypted.
        """
        query = select(SecretRow.organisation).distinct().where(SecretRow.organisation != organisation)
        async with self.database.read() as session:
            others = sorted((await session.execute(query)).scalars())
        left = 0
        for other in others:
            async with self.database.write() as session:
                for row in await _rows(session, other):
                    try:
                        await self.reseal(session, row)
                    except SecretMalformedError:
                        left += 1
        return left

    async def reseal(self, session: WriteSession, row: SecretRow) -> None:
        """Encrypt the row's value with the first key. A value that was set meanwhile stays."""
        if self.keyring.sealed_with(row.ciphertext) != "first key":
            sealed = self.keyring.seal(
                row.organisation, row.name, self.keyring.open(row.organisation, row.name, row.ciphertext)
            )
            same = (SecretRow.organisation == row.organisation, SecretRow.name == row.name)
            unchanged = SecretRow.ciphertext == row.ciphertext
            await session.execute(update(SecretRow).where(*same, unchanged).values(ciphertext=sealed))


async def _rows(session: ReadSession, organisation: str) -> list[SecretRow]:
    query = select(SecretRow).where(SecretRow.organisation == organisation).order_by(SecretRow.name)
    return list((await session.execute(query)).scalars())


SealedWith = Literal["first key", "older key", "unknown key"]

_VERSION: Final = b"\x01"
_FINGERPRINT_CONTEXT: Final = "bdn 2026-11-21 fingerprint of a secrets key"
_FINGERPRINT_BYTES: Final = 8
_NONCE_BYTES: Final = 12  # random: NIST SP 800-38D allows 2^32 of them for one key
_KEY_BYTES: Final = 32
_HEAD_BYTES: Final = len(_VERSION) + _FINGERPRINT_BYTES
_HOW: Final = "make one with 'bdn-admin secrets new-key'"


def new_key() -> str:
    """A key for ``BDN_SECRETS_KEY``; ``openssl rand -base64 32`` makes one, too."""
    return urlsafe_b64encode(os.urandom(_KEY_BYTES)).decode()


@dataclass(frozen=True)
class Keyring:
    """The keys of ``BDN_SECRETS_KEY``: the first seals, each of them opens. Without a key neither is possible."""

    keys: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """From the setting: keys in base64, comma separated.

        ``InvalidRequestError`` gives the position of a malformed key.
        """
        words = [word.strip() for word in (text or "").split(",")]
        return cls(tuple(_parse_key(word, position) for position, word in enumerate(words, start=1) if word))

    def seal(self, organisation: str, name: str, value: str) -> bytes:
        if not self.keys:
            problem = "the mirror has no key to encrypt secrets with"
            raise InvalidRequestError(
                f"{problem}: {_HOW}, set it as BDN_SECRETS_KEY for the mirror, and start it again"
            )
        key, nonce = self.keys[0], os.urandom(_NONCE_BYTES)
        head = _VERSION + _fingerprint(key)
        return head + nonce + AESGCM(key).encrypt(nonce, value.encode(), _bound_to(head, organisation, name))

    def open(self, organisation: str, name: str, sealed: bytes) -> str:
        """Decrypt a value. Raises ``SecretMalformedError`` for an unknown key, or another name or organisation."""
        head, rest = sealed[:_HEAD_BYTES], sealed[_HEAD_BYTES:]
        key = next((key for key in self.keys if head == _VERSION + _fingerprint(key)), None)
        if key is None:
            lacking = "is not one of the keys in" if self.keys else "has to be in"
            problem = f"is encrypted with a key that {lacking} the mirror's BDN_SECRETS_KEY"
            raise SecretMalformedError(name, f"{problem}; add that key to it, or {_again(name)}")
        try:
            nonce, encrypted = rest[:_NONCE_BYTES], rest[_NONCE_BYTES:]
            return AESGCM(key).decrypt(nonce, encrypted, _bound_to(head, organisation, name)).decode()
        except (InvalidTag, ValueError):
            problem = "cannot be decrypted: its row was changed, or made for another name or organisation"
            raise SecretMalformedError(name, f"{problem}; {_again(name)}") from None

    def sealed_with(self, sealed: bytes) -> SealedWith:
        """Which key opens it, by the fingerprint alone."""
        heads = [_VERSION + _fingerprint(key) for key in self.keys]
        if sealed[:_HEAD_BYTES] not in heads:
            return "unknown key"
        return "first key" if sealed[:_HEAD_BYTES] == heads[0] else "older key"


def _parse_key(word: str, position: int) -> bytes:
    urlsafe = word.replace("+", "-").replace("/", "_")
    if not re.fullmatch(r"[A-Za-z0-9_-]{43}=", urlsafe):  # the decoder itself skips characters outside base64
        raise InvalidRequestError(f"BDN_SECRETS_KEY: key {position} is not 32 bytes in base64; {_HOW}")
    return urlsafe_b64decode(urlsafe)


def _again(name: str) -> str:
    return f"set the secret again: bdn-admin secrets set {name}"


def _fingerprint(key: bytes) -> bytes:
    return blake3(key, derive_key_context=_FINGERPRINT_CONTEXT).digest(length=_FINGERPRINT_BYTES)


def _bound_to(head: bytes, organisation: str, name: str) -> bytes:
    return head + json.dumps([organisation, name]).encode()
