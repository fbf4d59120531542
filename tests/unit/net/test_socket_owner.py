"""Who is at the other end of a unix socket: the very user of this process, who sees the same files, or somebody else."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bdn.net.api_server import caller_of, is_owner
from tests.support.agent.mounts import needs_mounts

NOBODY = 65534
CONNECT = """
import os, socket, sys
if sys.argv[2] != "0":
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as client:
    client.connect("\\0" + sys.argv[1])
    print("connected", flush=True)
    if sys.argv[3] == "stays":
        sys.stdin.read()
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # a name of the kernel's choice, which needs no directory
        listener.listen()
        yield listener


def is_known(listener: socket.socket, *, user: int = 0, stays: bool = True, prefix: tuple[str, ...] = ()) -> bool:
    name = listener.getsockname()[1:].decode()
    command = [*prefix, sys.executable, "-c", CONNECT, name, str(user), "stays" if stays else "goes"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"connected\n"
        if not stays:
            client.wait()
        accepted, _ = listener.accept()
        with accepted:
            found = is_owner(accepted)
        client.communicate()
    return found


def test_a_process_of_this_user_is_the_owner_while_it_is_there(listener: socket.socket) -> None:
    assert is_known(listener)
    assert not is_known(listener, stays=False)


@needs_mounts
def test_another_user_and_one_who_sees_other_files_are_not(listener: socket.socket) -> None:
    assert not is_known(listener, user=NOBODY)
    assert not is_known(listener, prefix=("unshare", "--mount"))
    assert is_known(listener, prefix=("unshare", "--uts"))


def test_nobody_owns_a_connection_of_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert not is_owner(accepted)


@needs_mounts
def test_caller_of__client_is_of_another_user__returns_its_uid(listener: socket.socket) -> None:
    name = listener.getsockname()[1:].decode()
    command = [sys.executable, "-c", CONNECT, name, str(NOBODY), "goes"]
    subprocess.run(command, check=True, stdout=subprocess.PIPE)
    accepted, _ = listener.accept()
    with accepted:
        assert caller_of(accepted) == NOBODY


def test_caller_of__client_connected_to_a_port__returns_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        accepted, _ = server.accept()
        with accepted:
            assert caller_of(accepted) is None
