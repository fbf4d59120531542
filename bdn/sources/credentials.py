"""What a secret has to look like for each upstream. No value of a secret is ever in an error, a repr or a log."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Final

from bdn.core.errors import SecretMalformedError

DEFAULT_REGION: Final = "us-east-1"


@dataclass(frozen=True, slots=True)
class Secret:
    """A named secret, resolved just now."""

    name: str
    value: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class S3Credentials:
    """Keys of an S3 account; ``region`` is None where the secret does not name one."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    region: str | None = None


def hugging_face_token(secret: Secret) -> str:
    """The plain token. White space around it is forgiven: files end with a newline.

    Raises:
        SecretMalformedError: empty, or not one printable word, which could not stand in a header.
    """
    token = secret.value.strip()
    if not token:
        raise SecretMalformedError(secret.name, "is empty; it should be a plain Hugging Face token (hf_…)")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise SecretMalformedError(secret.name, "is not a plain Hugging Face token (hf_…), without quotes or JSON")
    return token


def s3_credentials(secret: Secret) -> S3Credentials:
    """From the JSON of CONTRACT section 1, or with the older key names, without ``aws_``.

    Raises:
        SecretMalformedError: not a JSON object, or naming the missing key.
    """
    document = _json_object(secret.value)
    if document is None:
        raise SecretMalformedError(
            secret.name,
            'is not a JSON object; it should be {"aws_access_key_id": …, "aws_secret_access_key": …, '
            '"aws_region": …, "aws_session_token": …}, the last two optional',
        )

    def member(name: str) -> str | None:
        value = document.get(f"aws_{name}", document.get(name))
        if value is None or value == "":
            return None
        if not isinstance(value, str):
            raise SecretMalformedError(secret.name, f'has an "aws_{name}" that is not a string')
        return value

    access_key_id, secret_access_key = member("access_key_id"), member("secret_access_key")
    if access_key_id is None:
        raise SecretMalformedError(secret.name, 'lacks the key "aws_access_key_id"')
    if secret_access_key is None:
        raise SecretMalformedError(secret.name, 'lacks the key "aws_secret_access_key"')
    return S3Credentials(access_key_id, secret_access_key, member("session_token"), member("region"))


def _json_object(text: str) -> dict[str, object] | None:
    # The parser's own error carries the whole text, so it ends here and is nobody's cause.
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
