"""What a service's log shows of itself and of libraries."""

import io
import logging
from collections.abc import Iterator
from contextlib import redirect_stderr

import pytest

from bdn.cli.output import log_to_stderr


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level, root.handlers = root.handlers, root.level, []
    levels = {name: logging.getLogger(name).level for name in ("bdn", "node_agent", "botocore")}
    text = io.StringIO()
    with redirect_stderr(text):
        log_to_stderr(logging.DEBUG)
    yield text
    root.handlers = handlers
    root.setLevel(level)
    for name, kept in levels.items():
        logging.getLogger(name).setLevel(kept)


def test_libraries_below_warning_are_never_shown_whatever_their_level(log: io.StringIO) -> None:
    logging.getLogger("botocore").setLevel(logging.DEBUG)
    logging.getLogger("botocore.auth").info("Signature=sesame")
    logging.getLogger().setLevel(logging.DEBUG)
    logging.getLogger("urllib3.connectionpool").debug("GET /?X-Amz-Signature=sesame")
    logging.getLogger("botocore.auth").warning("the clock is wrong")

    assert "sesame" not in log.getvalue()
    assert "WARNING botocore.auth the clock is wrong" in log.getvalue()


@pytest.mark.parametrize("name", ["bdn", "bdn.mirror.ingest.worker", "node_agent.app"])
def test_our_own_are_shown_from_the_wanted_level_on_with_their_fields(log: io.StringIO, name: str) -> None:
    logging.getLogger(name).debug("mirroring", extra={"mirror": "mir_1"})

    assert f"DEBUG {name} mirroring mirror=mir_1" in log.getvalue()


def test_a_library_that_is_called_like_us_is_not_one_of_us(log: io.StringIO) -> None:
    logging.getLogger().setLevel(logging.DEBUG)
    logging.getLogger("bdnsomething").info("sesame")

    assert log.getvalue() == ""
