"""Every place that the glossary names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_files_of_the_glossary_exist() -> None:
    named = re.findall(r"`([\w/]+(?:\.py|/))`", (ROOT / "docs/glossary.md").read_text())
    assert len(named) > 40
    assert [name for name in named if not (ROOT / name).exists() and not (ROOT / "bdn" / name).exists()] == []
