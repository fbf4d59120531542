"""Collects whatever a running mirror shows or keeps, and searches it for secrets."""

import io
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from bdn.cli.logs import log_to_stderr

OURS = ("bdn", "node_agent")
KEY_FILES = {"grant-key.pem", "identity-key.pem"}  # these hold keys, and are for that
# What tells a secret by its form, whatever its value.
PATTERNS = {
    "a signed address": re.compile(
        r"X-Amz-(?:Signature|Credential|Security-Token)|[?&](?:Signature|sig|X-Goog-Signature)=", re.IGNORECASE
    ),
    "a signature": re.compile(r"Signature=[0-9a-f]{16}|AWS4-HMAC-SHA256"),
    "a JWT": re.compile(r"eyJ[A-Za-z0-9_-]{8,}"),
    "a bearer": re.compile(r"Bearer [A-Za-z0-9._~+/-]{6,}"),
    "a token of Google": re.compile(r"ya29\.[A-Za-z0-9_-]+"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY"),
}
_GRANT = re.compile(r'"grant":\s*"[^"]+"')  # a token that callers are meant to have


@dataclass
class Seen:
    """Text by where it was seen. ``libraries`` is what our configuration of logging keeps away from ``log``."""

    log: io.StringIO = field(default_factory=io.StringIO)
    libraries: io.StringIO = field(default_factory=io.StringIO)
    records: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    rows: str = ""
    files: str = ""

    async def note(self, reply: httpx2.Response) -> None:
        """An event hook of a client: heads and bodies of answers, events included."""
        body = (await reply.aread()).decode(errors="replace")
        self.answers.append(_GRANT.sub('"grant":"…"', f"{reply.headers} {body}"))

    def places(self) -> dict[str, str]:
        return {
            "log": self.log.getvalue(),
            "records": "\n".join(self.records),
            "answers": "\n".join(self.answers),
            "rows": self.rows,
            "files": self.files,
        }

    def leaks(self, secrets: Iterable[str]) -> list[str]:
        """Each secret by its number, and each pattern by its name, with the place where it was found."""
        values = [secret for secret in secrets if secret]
        assert all(len(value) >= 6 for value in values)
        found: set[str] = set()
        for place, text in self.places().items():
            found |= {f"secret {number} in {place}" for number, value in enumerate(values) if value in text}
            for name, pattern in PATTERNS.items():
                found |= {f"{name} in {place}: {match[0][:60]}" for match in pattern.finditer(text)}
        return sorted(found)


class _Records(logging.Handler):
    """Our own records with all their fields, also what the format of the log leaves out; and what libraries say."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(logging.DEBUG)
        self._seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] in OURS:
            trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
            self._seen.records.append(f"{record.getMessage()} {vars(record)!r} {trace}")
        else:
            self._seen.libraries.write(f"{record.name} {record.getMessage()}\n")


@contextmanager
def logging_like_a_program(seen: Seen) -> Iterator[None]:
    """The programs' own configuration, and then every logger of the process at DEBUG, as a curious operator might do."""
    root = logging.getLogger()
    loggers = [found for found in root.manager.loggerDict.values() if isinstance(found, logging.Logger)]
    levels = [(logger, logger.level) for logger in (root, *loggers)]
    handlers, root.handlers = root.handlers, []  # the configuration would close those of pytest
    try:
        with redirect_stderr(seen.log):
            log_to_stderr("logfmt", logging.DEBUG)
        root.addHandler(_Records(seen))
        for logger in (root, *loggers):
            logger.setLevel(logging.DEBUG)
        yield
    finally:
        logging.captureWarnings(capture=False)
        root.handlers = handlers
        for logger, level in levels:
            logger.setLevel(level)


def text_of(folder: Path) -> str:
    """All that a mirror keeps in its folder, but for contents and for the files that are there to hold keys."""
    files = [path for path in folder.rglob("*") if path.is_file() and "chunks" not in path.parts]
    return "".join(path.read_bytes().decode(errors="replace") for path in files if path.name not in KEY_FILES)
