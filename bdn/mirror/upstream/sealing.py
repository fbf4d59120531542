"""Secrets at rest: AES-256-GCM, bound to the organisation and the name that a value was sealed for.

A sealed value is a version, the first bytes of the key's fingerprint, a nonce, and what AES-GCM makes; version, fingerprint,
organisation and name are authenticated with it, so that a row that was copied to another name does not open.
"""

from __future__ import annotations

import json
import os
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass, field
from typing import Final, Literal, Self

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bdn.core.errors import InvalidRequestError, SecretMalformedError

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
    """The keys of ``BDN_SECRETS_KEY``: the first seals, all of them open. Without a key nothing does."""

    keys: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """From the setting: keys in base64, comma separated.

        Raises:
            InvalidRequestError: saying which key is none, without showing it.
        """
        words = [word.strip() for word in (text or "").split(",")]
        return cls(tuple(_parse_key(word, position) for position, word in enumerate(words, start=1) if word))

    def seal(self, organisation: str, name: str, value: str) -> bytes:
        """The value, encrypted with the first key."""
        if not self.keys:
            problem = "the mirror has no key to encrypt secrets with"
            raise InvalidRequestError(
                f"{problem}: {_HOW}, set it as BDN_SECRETS_KEY for the mirror, and start it again"
            )
        key, nonce = self.keys[0], os.urandom(_NONCE_BYTES)
        head = _VERSION + _fingerprint(key)
        return head + nonce + AESGCM(key).encrypt(nonce, value.encode(), _bound_to(head, organisation, name))

    def open(self, organisation: str, name: str, sealed: bytes) -> str:
        """The value.

        Raises:
            SecretMalformedError: no key of ours sealed it, or it was sealed for another name or organisation.
        """
        head, rest = sealed[:_HEAD_BYTES], sealed[_HEAD_BYTES:]
        key = next((key for key in self.keys if head == _VERSION + _fingerprint(key)), None)
        if key is None:
            lacking = "is not among those of" if self.keys else "would have to be in"
            problem = f"is encrypted with a key that {lacking} the mirror's BDN_SECRETS_KEY"
            raise SecretMalformedError(name, f"{problem}; add that key to it, or {_again(name)}")
        try:
            nonce, encrypted = rest[:_NONCE_BYTES], rest[_NONCE_BYTES:]
            return AESGCM(key).decrypt(nonce, encrypted, _bound_to(head, organisation, name)).decode()
        except (InvalidTag, ValueError):
            problem = "cannot be decrypted: its row was changed, or made for another name or organisation"
            raise SecretMalformedError(name, f"{problem}; {_again(name)}") from None

    def sealed_with(self, sealed: bytes) -> SealedWith:
        """Which key opens it, as far as can be told without opening it."""
        heads = [_VERSION + _fingerprint(key) for key in self.keys]
        if sealed[:_HEAD_BYTES] not in heads:
            return "unknown key"
        return "first key" if sealed[:_HEAD_BYTES] == heads[0] else "older key"


def _parse_key(word: str, position: int) -> bytes:
    urlsafe = word.replace("+", "-").replace("/", "_")
    if not re.fullmatch(r"[A-Za-z0-9_-]{43}=", urlsafe):  # the decoder itself skips what is no base64
        raise InvalidRequestError(f"BDN_SECRETS_KEY: key {position} is not 32 bytes in base64; {_HOW}")
    return urlsafe_b64decode(urlsafe)


def _again(name: str) -> str:
    return f"set the secret again: bdn-admin secrets set {name}"


def _fingerprint(key: bytes) -> bytes:
    """Tells keys apart and tells nothing of them."""
    return blake3(key, derive_key_context=_FINGERPRINT_CONTEXT).digest(length=_FINGERPRINT_BYTES)


def _bound_to(head: bytes, organisation: str, name: str) -> bytes:
    return head + json.dumps([organisation, name]).encode()
