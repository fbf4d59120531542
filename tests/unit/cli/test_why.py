"""What ``bdn-admin why`` asks the mirror for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bdn.cli.admin import main
from bdn.net.client.mirror_client import MirrorClient
from bdn.net.client.service_client import Params
from bdn.wire.event_schema import MANIFESTS_AT_ONCE, Named, ShownEvent
from bdn.wire.mirror_schema import HeldManifests
from bdn.wire.shapes import Page
from tests.support.content.names import named

MANIFESTS = [str(named(f"revision {number}")) for number in range(2 * MANIFESTS_AT_ONCE + 1)]
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def event(manifest: str) -> ShownEvent:
    """A restoration; the revisions came one after the other."""
    number = MANIFESTS.index(manifest)
    at = BEGAN + timedelta(minutes=number)
    return ShownEvent(
        id=f"evt_{number}", at=at, kind="restored", manifest=manifest, facts={}, sentence=f"was number {number}"
    )


def test_a_source_with_hundreds_of_revisions_is_asked_about_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def of_source(_: MirrorClient, of: str) -> Named:
        return Named(of=of, kind="source", manifests={one: [of] for one in MANIFESTS})

    async def events(_: MirrorClient, params: Params) -> Page[ShownEvent]:
        asked: Any = params["manifest"]
        assert len(asked) <= MANIFESTS_AT_ONCE  # the mirror refuses more
        return Page[ShownEvent](items=[event(one) for one in reversed(asked)])

    async def held(_: MirrorClient) -> HeldManifests:
        return HeldManifests(items=[])

    for name, answer in (("named", of_source), ("events", events), ("held", held)):
        monkeypatch.setattr(MirrorClient, name, answer)
    monkeypatch.setenv("BDN_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("BDN_URL", "http://mirror:8460")

    said = CliRunner().invoke(main, ["why", "hf://org/model", "--limit", "2"])

    assert said.exit_code == 0, said.output
    first, last = said.output.splitlines()[-2:]
    assert (first.rpartition(" ")[2], last.rpartition(" ")[2]) == (str(len(MANIFESTS) - 2), str(len(MANIFESTS) - 1))
