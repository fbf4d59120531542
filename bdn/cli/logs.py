"""Logs of services: one event per line, a fixed phrase plus fields, on standard error."""

from __future__ import annotations

import logging
import sys

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class FieldsFormatter(logging.Formatter):
    """``2026-11-20T18:00:00 INFO bdn.mirror.ingest.worker mirroring mirror=mir_… sources=1``."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, with the record's extra fields behind the phrase."""
        line = super().format(record)
        fields = " ".join(f"{name}={value}" for name, value in vars(record).items() if name not in _STANDARD)
        head, newline, trace = line.partition("\n")
        return f"{head} {fields}{newline}{trace}" if fields else line


_OURS = ("bdn", "node_agent")


def _is_ours_or_a_warning(record: logging.LogRecord) -> bool:
    """Below WARNING, libraries say what they send and receive: keys, tokens, signed addresses (botocore, urllib3, httpx2).

    Held at the handler, where no level that somebody sets on a library's logger leads around it.
    """
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] in _OURS


def log_to_stderr(level: int = logging.INFO) -> None:
    """For services in the foreground. Libraries speak up from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_is_ours_or_a_warning)
    handler.setFormatter(FieldsFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(level)
