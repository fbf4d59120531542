"""docs/patterns.md is true: every row of its tables is what the code does, and what the client does."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined] # that is where it is documented

from bdn.core.errors import InvalidRequestError
from bdn.core.source.uri import Patterns, literal_prefixes, select
from bdn.wire.mirror_schema import WeightsSourceBody

PAGE = Path(__file__).parents[3] / "docs/patterns.md"
SELECTION = ["allow_patterns", "ignore_patterns", "selected", "not selected"]
COMPARISON = ["pattern", "path", "here", "huggingface_hub"]


def tables() -> Iterator[tuple[list[str], list[str]]]:
    """The header of its table, and each row."""
    header: list[str] = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and not header:
            header = cells
        elif cells and set(cells) != {"---"}:
            yield header, cells
        elif not cells:
            header = []


def rows(header: list[str]) -> list[list[str]]:
    return [cells for of, cells in tables() if of == header]


def spans(cell: str) -> list[str]:
    """The texts in backquotes; one that is itself in quotes is a JSON string."""
    found = re.findall(r"`([^`]+)`", cell)
    assert cell == " ".join(f"`{text}`" for text in found), f"something else than code in {cell!r}"
    return [str(json.loads(text)) if text.startswith('"') else text for text in found]


@dataclass(frozen=True)
class Row:
    allow: str
    ignore: str
    selected: tuple[str, ...]
    left: tuple[str, ...]

    def patterns(self) -> Patterns:
        """As a request of a user means them."""
        fields = {"allow_patterns": self.allow, "ignore_patterns": self.ignore}
        given = {name: json.loads(spans(cell)[0]) for name, cell in fields.items() if cell}
        body = WeightsSourceBody.model_validate({"source": "hf://o/r", "mount_location": "/m", **given})
        return body.to_core().patterns


SELECTIONS = [
    Row(allow, ignore, tuple(spans(selected)), tuple(spans(left))) for allow, ignore, selected, left in rows(SELECTION)
]
COMPARISONS = [(spans(pattern)[0], spans(path)[0], here, there) for pattern, path, here, there in rows(COMPARISON)]
NAMES = [f"{number} {row.allow} {row.ignore}" for number, row in enumerate(SELECTIONS, start=1)]
REFUSED = [spans(pattern)[0] for (pattern,) in rows(["pattern"])]


def test_the_tables_are_read_whole() -> None:
    lines = sum(line.startswith("| ") for line in PAGE.read_text(encoding="utf-8").splitlines())
    headers = [of for of, _ in tables()]
    assert lines == len(headers) + len({id(of) for of in headers})
    assert len(SELECTIONS) >= 80
    assert len({(row.allow, row.ignore, row.selected) for row in SELECTIONS}) == len(SELECTIONS)
    assert len(SELECTIONS) + len(COMPARISONS) + len(REFUSED) == len(headers)


@pytest.mark.parametrize("row", SELECTIONS, ids=NAMES)
def test_a_row_selects_what_it_says(row: Row) -> None:
    assert row.selected or row.left
    patterns = row.patterns()
    paths = [path for pair in zip(row.left, row.selected, strict=False) for path in pair]  # mixed: order is kept
    paths += [path for path in (*row.selected, *row.left) if path not in paths]
    assert set(select(paths, patterns).paths) == set(row.selected)
    assert select(paths, patterns).paths == tuple(path for path in paths if path in row.selected)
    assert all(path.startswith(literal_prefixes(patterns)) for path in row.selected)


@pytest.mark.parametrize("pattern", REFUSED, ids=ascii)
@pytest.mark.parametrize("field", ["allow_patterns", "ignore_patterns"])
def test_a_refused_pattern_is_an_invalid_request(pattern: str, field: str) -> None:
    body = WeightsSourceBody.model_validate({"source": "hf://o/r", "mount_location": "/m", field: [pattern]})
    with pytest.raises(InvalidRequestError, match="patterns are relative to the source"):
        body.to_core()


@pytest.mark.parametrize(("pattern", "path", "here", "there"), COMPARISONS)
def test_the_note_for_users_of_huggingface_hub_is_true(pattern: str, path: str, here: str, there: str) -> None:
    answers = {"yes": [path], "no": []}
    assert list(select([path], Patterns((pattern,))).paths) == answers[here]
    assert list(filter_repo_objects([path], allow_patterns=[pattern])) == answers[there]
