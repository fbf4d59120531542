"""Fixtures of tests of an agent: name this module in ``pytest_plugins``."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bdn.net.http1.pool import ConnectionPool
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.mounts import unmounting
from tests.support.agent.rig import Rig


@pytest.fixture(scope="module")
def server() -> Iterator[AgentMirror]:
    """A mirror for all tests of a module, which take what they need from it with ``renewed``."""
    with AgentMirror().running() as mirror:
        yield mirror


@pytest.fixture
def rig(mirror: AgentMirror, tmp_path: Path) -> Iterator[Rig]:
    """A node of the module's ``mirror`` at the test's own directory, which leaves no mounts behind."""
    with unmounting(tmp_path):
        yield Rig(mirror, tmp_path)


@pytest.fixture
def peer() -> Iterator[ConnectionPool]:
    """The connections of somebody who asks agents for chunks (``tests.support.agent.site.ask``)."""
    pool = ConnectionPool(timeout_seconds=20)
    yield pool
    pool.close()
