"""What a service's log shows of itself and of libraries, and in which form."""

import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr

import pytest

from bdn.cli.logs import log_to_stderr
from bdn.settings import LogForm
from tests.support.services.logs import fields_of

_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@pytest.fixture
def begin() -> Iterator[Callable[[LogForm], io.StringIO]]:
    root = logging.getLogger()
    handlers, level, root.handlers = root.handlers, root.level, []
    levels = {name: logging.getLogger(name).level for name in ("bdn", "node_agent", "botocore")}
    text = io.StringIO()

    def started(form: LogForm) -> io.StringIO:
        with redirect_stderr(text):
            log_to_stderr(form, logging.DEBUG)
        return text

    yield started
    logging.captureWarnings(capture=False)
    root.handlers = handlers
    root.setLevel(level)
    for name, kept in levels.items():
        logging.getLogger(name).setLevel(kept)


@pytest.fixture
def log(begin: Callable[[LogForm], io.StringIO]) -> io.StringIO:
    return begin("logfmt")


def test_libraries_below_warning_are_never_shown_whatever_their_level(log: io.StringIO) -> None:
    logging.getLogger("botocore").setLevel(logging.DEBUG)
    logging.getLogger("botocore.auth").info("Signature=sesame")
    logging.getLogger().setLevel(logging.DEBUG)
    logging.getLogger("urllib3.connectionpool").debug("GET /?X-Amz-Signature=sesame")
    logging.getLogger("botocore.auth").warning("the clock is wrong")

    assert "sesame" not in log.getvalue()
    assert fields_of(log.getvalue().rstrip("\n"))["msg"] == "the clock is wrong"


@pytest.mark.parametrize("name", ["bdn", "bdn.mirror.ingest.worker", "node_agent.app"])
def test_our_own_are_shown_from_the_wanted_level_on_with_time_level_and_fields(log: io.StringIO, name: str) -> None:
    logging.getLogger(name).debug("mirror ready", extra={"mirror": "mir_1", "bytes": 5})

    said = fields_of(log.getvalue().rstrip("\n"))
    assert _MOMENT.fullmatch(said.pop("time"))
    assert said == {"level": "debug", "logger": name, "msg": "mirror ready", "mirror": "mir_1", "bytes": "5"}


def test_a_library_that_is_called_like_us_is_not_one_of_us(log: io.StringIO) -> None:
    logging.getLogger().setLevel(logging.DEBUG)
    logging.getLogger("bdnsomething").info("sesame")

    assert log.getvalue() == ""


@pytest.mark.parametrize("form", ["logfmt", "json"])
def test_every_record_is_one_line_of_the_same_form_whoever_writes_it(
    begin: Callable[[LogForm], io.StringIO], form: LogForm
) -> None:
    text = begin(form)
    hostile = 'two\nlines "quoted" a=b \x1b[31m \u2028 \x9b ünïcödé \\'
    logging.getLogger("bdn").info("staged", extra={"path": hostile, "none": None, "flag": True, "list": ["a b"]})
    try:
        raise ValueError(hostile)  # noqa: TRY301 - it is the traceback that counts
    except ValueError:
        logging.getLogger("sqlalchemy.pool.impl.QueuePool").exception("Exception during reset or similar")
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application\n")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn_explicit("is deprecated", DeprecationWarning, "library.py", 1)

    lines = text.getvalue().split("\n")[:-1]
    said = [json.loads(line) if form == "json" else fields_of(line) for line in lines]
    assert [one["logger"] for one in said] == ["bdn", "sqlalchemy.pool.impl.QueuePool", "uvicorn.error", "py.warnings"]
    assert all(line.isprintable() for line in lines)
    assert said[0]["path"] == hostile
    assert said[0]["none"] == (None if form == "json" else "null")
    assert all("ValueError: two\nlines" in one["trace"] for one in said[1:3])
    assert all(_MOMENT.fullmatch(one["time"]) for one in said)
