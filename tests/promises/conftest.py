"""What several promises stand on. A module that needs another mirror has a fixture of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent.mirror import AgentMirror
from tests.support.content.calendar import Calendar
from tests.support.crash.forgetful_disk import ForgetfulDisk, forgetful_disk


@pytest.fixture
def mirror(server: AgentMirror, request: pytest.FixtureRequest) -> AgentMirror:
    """It gives small files away whole, unless the test is of both forms."""
    return server.renewed(is_packed=getattr(request, "param", "whole") == "packed")


@pytest.fixture
def calendar() -> Calendar:
    return Calendar()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[ForgetfulDisk]:
    with forgetful_disk(tmp_path) as disk:
        yield disk
