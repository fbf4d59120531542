"""Logs of services: one event per line on standard error, a fixed phrase and fields, in the format of ``BDN_LOG``.

``logfmt``: ``time=2026-11-20T18:00:00.123Z level=info logger=bdn.mirror.ingest.worker msg="mirror ready" mirror=mir_…``
``json``: the same names and values as one object.
"""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Final

from bdn.core.printable import printable
from bdn.settings import LogForm

_OURS: Final = ("bdn", "node_agent")
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_BARE: Final = re.compile(r'[^\s"=\\]+')


class LineFormatter(logging.Formatter):
    """Every record becomes one line: a traceback is the field ``trace``, and unprintable characters are escaped."""

    def __init__(self, form: LogForm) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "time": f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
            **_fields(self, record),
        }
        return json.dumps(said, default=str) if self._form == "json" else _logfmt(said)


class RemarkFormatter(logging.Formatter):
    """A command's form of a record: ``warning: checkpoint 'x' was not pushed error="disk full"``."""

    def format(self, record: logging.LogRecord) -> str:
        said = printable(record.getMessage())
        return f"{record.levelname.lower()}: {said} {_logfmt(_fields(self, record))}".rstrip()


def _fields(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    if record.exc_info:
        fields["trace"] = formatter.formatException(record.exc_info)
    return fields


def _logfmt(fields: dict[str, object]) -> str:
    return " ".join(f"{name}={_written(value)}" for name, value in fields.items())


def _written(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if _BARE.fullmatch(text) and text.isprintable() else printable(json.dumps(text, ensure_ascii=False))


def _is_ours_or_a_warning(record: logging.LogRecord) -> bool:
    """Below WARNING, botocore, urllib3 and httpx2 log what they send and receive: keys, tokens, signed addresses.

    Filtered at the handler: a level set on a library's logger would bypass the root logger's level.
    """
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] in _OURS


def warn_on_stderr() -> None:
    """For commands: escape warnings on standard error; Python's last resort would print the bare message, unescaped."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(RemarkFormatter())


def log_to_stderr(form: LogForm, level: int = logging.INFO) -> None:
    """For services in the foreground. Libraries, and Python's own warnings, log from WARNING on, in the same form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_is_ours_or_a_warning)
    handler.setFormatter(LineFormatter(form))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(level)
