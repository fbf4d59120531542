"""The lines of a service's log, read as logfmt."""

import json
import re
from pathlib import Path

_FIELD = re.compile(r'([^\s="]+)=("(?:[^"\\]|\\.)*"|[^\s"=]*)(?: |$)')


def fields_of(line: str) -> dict[str, str]:
    """The fields of one line; a line of another form is an error."""
    found, at = {}, 0
    for match in _FIELD.finditer(line):
        assert match.start() == at, line
        found[match[1]] = json.loads(match[2]) if match[2].startswith('"') else match[2]
        at = match.end()
    assert at == len(line), line
    return found


def lines_of(log: Path) -> list[dict[str, str]]:
    """Every line of the log."""
    return [fields_of(line) for line in log.read_text().splitlines()]
