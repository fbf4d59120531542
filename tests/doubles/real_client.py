"""A place where the real ``huggingface_hub`` client can run beside a double without touching the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants


def confine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the client's cache below ``folder``, its progress bars off the terminal, and its telemetry at home."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    # The client asks its own idea of the hub, once, which harness it runs in, unless it knows already.
    registry = folder / "harnesses.json"
    registry.write_text('{"standardEnvVars": [], "harnesses": {}}')
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(registry))
