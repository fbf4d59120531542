"""What a writer tells the test that started it, one JSON document a line, and how it waits for that one."""

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any


def report(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def wait() -> None:
    """Until the test says: go on."""
    if not sys.stdin.readline():
        raise SystemExit("the test has ended")


def digests(folder: Path) -> dict[str, str]:
    """Every file below a folder, hidden ones too, and what it holds."""
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def complete(folder: Path, state: str) -> None:
    """All of this checkpoint is there, and it holds this state of the model."""
    report(complete=folder.name, files=digests(folder), state=state)
