"""Whom the mirror asks for the bytes that it lacks: no agent to which its grant would go in the clear."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from bdn.core.errors import StoreUnavailableError
from bdn.mirror.db import agents, origins
from bdn.mirror.db.damaged import Damage
from bdn.mirror.db.origins import Origin
from bdn.mirror.db.tables import AgentRow, MirrorSourceRow
from bdn.mirror.upkeep.repair import AgentSource, Attempt
from bdn.net.http1.pool import ConnectionPool
from bdn.wire.grants import GrantSigner, new_signing_key
from tests.support.content.names import named
from tests.support.mirror.service import database_under_test

NAME = named("chunk")
ADDRESSES = ("http://10.0.0.5:8471", "http://127.0.0.1:8471", "https://gpu-2.example:8471")


class Network:
    """Gives nothing, and keeps whom it was to ask."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get(self, url: str, headers: Mapping[str, str], *_: object) -> None:
        assert "Authorization" in headers
        self.asked.append(url.partition("/chunks")[0])
        raise StoreUnavailableError("nobody is there")


async def holders(*_: Any) -> list[AgentRow]:
    return [AgentRow(cluster="c", node=f"n{number}", advertise=url) for number, url in enumerate(ADDRESSES)]


async def one_origin(*_: Any) -> list[Origin]:
    return [Origin("org", None, named("manifest").hex, MirrorSourceRow(source="hf://o/r"))]


@pytest.mark.parametrize(("requires_tls", "asked"), [(True, ADDRESSES[1:]), (False, ADDRESSES)])
async def test_a_mirror_with_a_certificate_sends_no_grant_in_the_clear(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, requires_tls: bool, asked: tuple[str, ...]
) -> None:
    monkeypatch.setattr(origins, "origins", one_origin)
    monkeypatch.setattr(agents, "living_holders", holders)
    network, signer = Network(), GrantSigner(new_signing_key())
    damage = Damage(NAME, 5, "it is absent")
    attempt = Attempt({NAME: damage})
    async with database_under_test(tmp_path) as database:
        source = AgentSource(database, cast(ConnectionPool, network), signer, requires_tls=requires_tls)
        assert await source.fetch(damage, attempt) is None
    assert tuple(network.asked) == asked
    assert ("agent c/n0 is skipped: its address is plain HTTP" in attempt.reason(NAME)) == requires_tls
