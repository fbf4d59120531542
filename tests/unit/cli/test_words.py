"""What commands say, where it takes no service to find out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from click.testing import CliRunner

from bdn.cli import admin, ls
from bdn.cli.main import main as bdn
from bdn.cli.output import USAGE
from bdn.wire.agent_schema import AgentDocument
from bdn.wire.mirror_schema import HeldManifest, HeldManifests, Holding
from bdn.wire.shapes import Items
from bdn.wire.stage_schema import TierUse

MANIFEST = f"b3:{'0' * 64}"


def test_an_argument_that_cannot_be_is_named_as_it_is_and_not_as_a_setting() -> None:
    done = CliRunner().invoke(admin.main, ["evict", "--lru", "0"])

    assert (done.exit_code, done.output) == (USAGE, "error: lru_bytes: Input should be greater than 0\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evict"], "exactly one"),
        (["evict", "--all", "--job", "train-7"], "exactly one"),
        (["prefetch", "hf://org/model"], "say where to"),
    ],
)
def test_options_that_do_not_go_together_are_a_matter_of_usage(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(admin.main, arguments)

    assert done.exit_code == 2
    assert words in done.stderr


def test_a_setting_that_cannot_be_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BDN_UPLOAD_RATE", "0")

    done = CliRunner().invoke(bdn, ["migrate"])

    assert (done.exit_code, done.output) == (USAGE, "error: BDN_UPLOAD_RATE: Input should be greater than 0\n")


def test_what_an_agent_holds_for_its_cluster_is_listed_beside_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        async def held(self) -> HeldManifests:
            nodes = {
                "c/node": Holding(manifest=MANIFEST, bytes=17_000_000, held_by=["job"]),
                "c/cache": Holding(manifest=MANIFEST, bytes=0, complete=False, cluster_bytes=5_000_000),
            }
            one = HeldManifest(
                manifest=MANIFEST, sources=["hf://o/m"], files_total=None, bytes_total=None, mirror=False, nodes=nodes
            )
            return HeldManifests(items=[one])

    @asynccontextmanager
    async def reachable_mirror(_: object) -> AsyncIterator[Client]:
        yield Client()

    monkeypatch.setattr(ls, "reachable_mirror", reachable_mirror)

    assert CliRunner().invoke(admin.main, ["ls"]).output.splitlines() == [
        f"hf://o/m  {MANIFEST}",
        "  c/node: whole, 17 MB, in use by job",
        "  c/cache: incomplete, 0 B, 5 MB for its cluster",
    ]


def test_an_agent_that_takes_nothing_new_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        async def agents(self) -> Items[AgentDocument]:
            use = TierUse(budget=10, committed=10, reserved=0, leased=0, problem="Input/output error")
            one = AgentDocument(
                node="n", cluster="c", roles=["node"], version="1", advertise=None, tiers={"node": use},
                last_heartbeat=datetime(2026, 1, 2, tzinfo=UTC), alive=True, manifests=1,
            )  # fmt: skip
            return Items[AgentDocument](items=[one])

    @asynccontextmanager
    async def reachable_mirror(_: object) -> AsyncIterator[Client]:
        yield Client()

    monkeypatch.setattr(ls, "reachable_mirror", reachable_mirror)

    assert CliRunner().invoke(admin.main, ["agents"]).output.splitlines() == [
        "c/n  alive since 2026-01-02 00:00:00Z  1 manifests",
        "  node: 10 B held, 0 B being filled, 0 B in use, of 10 B; takes nothing new: Input/output error",
    ]
