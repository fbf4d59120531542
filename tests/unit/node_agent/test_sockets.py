import socket
import stat
from pathlib import Path

import pytest

from bdn.core.errors import InUseError, InvalidRequestError
from node_agent.api import unix_socket


def test_the_socket_is_for_its_owner_and_group_and_goes_with_the_agent(tmp_path: Path) -> None:
    path = tmp_path / "new/agent.sock"
    with unix_socket(path):
        assert stat.filemode(path.stat().st_mode) == "srw-rw----"
    assert not path.exists()


def test_the_socket_of_a_dead_agent_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    with unix_socket(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_the_socket_of_a_living_agent_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with unix_socket(path):
        with pytest.raises(InUseError, match="another agent"), unix_socket(path):
            pass
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_path_that_no_socket_can_have_is_refused_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="BDN_AGENT_SOCKET"), unix_socket(tmp_path / ("x" * 120)):
        pass
