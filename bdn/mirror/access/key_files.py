"""Files of private keys that all processes of one mirror share."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from bdn.core.errors import InvalidRequestError
from bdn.disk.durable import kept_key
from bdn.mirror.settings import MirrorSettings
from bdn.wire.grants import GrantSigner, new_signing_key

_OTHERS: Final = 0o007
_Keys = TypeVar("_Keys")


def load_grant_signer(settings: MirrorSettings) -> GrantSigner:
    """The keys that sign and verify grants. Blocking. Raises ``InvalidRequestError`` as ``read_keys``."""
    make = "openssl genpkey -algorithm ed25519 -out FILE && chmod 400 FILE"
    signer = read_keys(settings, "grant_key_file", GrantSigner, new_signing_key, make)
    given = settings.grant_key_file
    if given and given.stat().st_mode & _OTHERS:
        raise InvalidRequestError(
            f"BDN_GRANT_KEY_FILE: every user of this machine can read {given}; run: chmod o= {given} "
            "(a mounted secret of Kubernetes: defaultMode 0440)"
        )
    return signer


def read_keys(
    settings: MirrorSettings, field: str, parse: Callable[[bytes], _Keys], new: Callable[[], bytes], make: str
) -> _Keys:
    """The keys in the operator's file, or in one of the data directory, created if there is none. Blocking.

    Args:
        settings: of the mirror.
        field: of ``settings``: names the operator's file.
        parse: makes keys of a file's content; ``ValueError`` describes the content and repeats none of it.
        new: a fresh key, PEM.
        make: the command that creates one.

    Raises:
        InvalidRequestError: the keys cannot be used; or several processes would each create a key and refuse each
            other's signatures.
    """
    setting, own = f"BDN_{field.upper()}", settings.data_dir / f"{field.removesuffix('_file').replace('_', '-')}.pem"
    given: Path | None = getattr(settings, field)
    if given is None and not settings.is_embedded:
        until_now = (
            f"Until now this process used {own}: give that file to all of them, or one file with the keys of all of them"
            if own.exists()
            else f"Make it with: {make}"
        )
        raise InvalidRequestError(
            f"with PostgreSQL set {setting} to a file with the same keys for every replica and worker. {until_now}"
        )
    try:
        return parse(given.read_bytes() if given else kept_key(own, new))
    except OSError as error:
        raise InvalidRequestError(f"{setting}: {given or own} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidRequestError(f"{setting}: {given or own} {error}; make a key with: {make}") from None
