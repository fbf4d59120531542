"""Fixtures of tests of an agent: name this module in ``pytest_plugins``."""

from collections.abc import Iterator

import pytest

from bdn.net.http1.pool import ConnectionPool
from tests.support.agent.mirror import AgentMirror


@pytest.fixture(scope="module")
def server() -> Iterator[AgentMirror]:
    """A mirror for all tests of a module, which take what they need from it with ``renewed``."""
    with AgentMirror().running() as mirror:
        yield mirror


@pytest.fixture
def peer() -> Iterator[ConnectionPool]:
    """The connections of somebody who asks agents for chunks (``tests.support.agent.site.ask``)."""
    pool = ConnectionPool(timeout_seconds=20)
    yield pool
    pool.close()
