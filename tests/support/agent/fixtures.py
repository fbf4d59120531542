"""Fixtures of tests of an agent: name this module in ``pytest_plugins``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.agent.mirror import AgentMirror


@pytest.fixture(scope="module")
def server() -> Iterator[AgentMirror]:
    """A mirror for all tests of a module, which take what they need from it with ``renewed``."""
    with AgentMirror().running() as mirror:
        yield mirror
