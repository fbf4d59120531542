"""``bdn-admin secrets``, as a user types it."""

import contextlib
import os
import pty
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.doubles.hub import Hub
from tests.support.content.trees import tree
from tests.support.services.cluster import Cluster
from tests.support.services.commands import SCRIPTS, Finished, Shell

VALUE = "hf_sesame_0123456789"
CTRL_C = b"\x03"


@pytest.fixture
def keyed(shell: Shell) -> Shell:
    """A user with a key of the user's own."""
    key = shell.run("bdn-admin", "secrets", "new-key")
    assert (key.code, key.err, len(key.out)) == (0, "", 45)
    return replace(shell, extra={**shell.extra, "BDN_SECRETS_KEY": key.out.strip()})


def given(shell: Shell, value: bytes, *arguments: str) -> Finished:
    """``secrets set`` with a value on standard input."""
    return shell.run("bdn-admin", "secrets", "set", *arguments, given=value)


def test_a_secret_set_before_the_first_pull_opens_a_private_repository(keyed: Shell, hub: Hub) -> None:
    hub.repo("org/private", private=True).commit({"a.txt": b"1"})
    (keyed.root / "token").write_text(f"{hub.token}\n")
    done = keyed.run("bdn-admin", "secrets", "set", "team-token", "--from-file", "token", "--json")
    assert (done.code, done.document["name"]) == (0, "team-token"), done.err
    pulled = keyed.run("bdn", "pull", "hf://org/private", "out", "--secret", "team-token", "--json")
    assert pulled.code == 0, pulled.out + pulled.err
    assert tree(keyed.root / "out") == {"a.txt": b"1"}

    listed = keyed.run("bdn-admin", "secrets", "ls")
    assert listed.out.startswith("team-token  set 20")
    assert [item["name"] for item in keyed.run("bdn-admin", "secrets", "ls", "--json").document["items"]] == [
        "team-token"
    ]
    assert keyed.run("bdn-admin", "secrets", "rm", "team-token").code == 0
    again = keyed.run("bdn-admin", "secrets", "rm", "team-token", "--json")
    assert (again.code, again.document["error"]["code"]) == (4, "NOT_FOUND")
    refused = keyed.run("bdn", "pull", "hf://org/private", "new", "--secret", "team-token", "--json")
    assert (refused.code, refused.document["error"]["code"]) == (4, "SECRET_NOT_FOUND")
    texts = [done.out, done.err, pulled.out, pulled.err, listed.out, listed.err, refused.out, refused.err]
    files = [path for path in keyed.data.rglob("*") if path.is_file()]
    for secret in (hub.token, keyed.extra["BDN_SECRETS_KEY"]):
        assert secret not in "".join(texts)
        assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_a_value_comes_from_standard_input_and_wrong_ones_are_refused_at_once(keyed: Shell) -> None:
    assert given(keyed, b"", "empty").code == 2
    assert "is empty" in given(keyed, b"\n", "empty").err
    assert "is not text" in given(keyed, b"\xff\xfe", "binary").err
    assert "over the limit of 65536" in given(keyed, b"x" * 70_000, "long").err
    assert "begins like a JSON object" in given(keyed, f"{{{VALUE}".encode(), "json").err
    misnamed = given(keyed, b"x", "a/b")
    assert (misnamed.code, "cannot name a secret" in misnamed.err) == (2, True)
    assert not keyed.data.exists()  # nothing was started for them
    assert given(keyed, f"{VALUE}\r\n".encode(), "good").code == 0
    assert given(keyed, b"x" * 65536 + b"\n", "longest", "--from-file", "-").code == 0
    assert [item["name"] for item in keyed.run("bdn-admin", "secrets", "ls", "--json").document["items"]] == [
        "good",
        "longest",
    ]


def test_a_value_is_never_taken_from_the_command_line(keyed: Shell) -> None:
    refused = keyed.run("bdn-admin", "secrets", "set", "name", VALUE)
    assert refused.code == 2
    assert "unexpected extra argument" in refused.err


def typed(shell: Shell, answer: bytes) -> tuple[int, bytes]:
    """Exit code of ``secrets set`` on a terminal where somebody answers the prompt, and what the terminal showed."""
    ours, theirs = pty.openpty()
    command = [str(SCRIPTS / "bdn-admin"), "secrets", "set", "typed"]
    process = subprocess.Popen(
        command, env=shell.environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    shown = b""
    while b"value of typed" not in shown:
        shown += os.read(ours, 1024)
    if answer == CTRL_C:  # the terminal controls no session here, so its signal is sent by hand
        process.send_signal(signal.SIGINT)
    else:
        os.write(ours, answer)
    with contextlib.suppress(OSError):  # Linux tells so that the other side of a terminal is gone
        while piece := os.read(ours, 1024):
            shown += piece
    os.close(ours)
    return process.wait(60), shown


def test_on_a_terminal_the_value_is_asked_for_and_not_shown(keyed: Shell) -> None:
    code, shown = typed(keyed, f"{VALUE}\n".encode())
    assert code == 0, shown
    assert b"is set" in shown
    assert VALUE.encode() not in shown


def test_a_prompt_is_left_with_one_ctrl_c(keyed: Shell) -> None:
    code, shown = typed(keyed, CTRL_C)
    assert code == 130, shown
    assert b"interrupted" in shown
    assert not keyed.data.exists()


def test_without_a_key_the_command_says_how_to_make_one(shell: Shell) -> None:
    refused = given(shell, VALUE.encode(), "name")
    assert refused.code == 2
    assert "bdn-admin secrets new-key" in refused.err
    assert VALUE not in refused.err + refused.out


def test_the_secrets_of_a_service_are_set_from_elsewhere_with_its_token(tmp_path: Path, hub: Hub, keyed: Shell) -> None:
    root, token = tmp_path / "cluster", {"BDN_TOKEN": "operator-token-7"}
    key = {"BDN_SECRETS_KEY": keyed.extra["BDN_SECRETS_KEY"]}
    cluster = Cluster(root, {"HF_ENDPOINT": hub.url, **token})
    root.mkdir()
    with cluster.mirror(BDN_AUTH="token", **key):
        stranger = Shell(tmp_path, {"BDN_URL": cluster.url}, is_forked=True)
        user = replace(stranger, extra={**stranger.extra, **token})
        assert "UNAUTHENTICATED" in given(stranger, VALUE.encode(), "team").err
        done = given(user, VALUE.encode(), "team")
        assert (done.code, done.out) == (0, f"secret 'team' is set, at {cluster.url}\n")
        rotated = user.run("bdn-admin", "secrets", "rotate").out
        assert rotated.startswith("team  set 20")
        assert rotated.endswith(
            "the secrets of all organisations are encrypted with the first key: the older keys can go\n"
        )
        of_one = user.run("bdn-admin", "secrets", "rotate", BDN_ORGANISATION="acme").out
        assert of_one == "these are the secrets of one organisation; others' may still need the older keys\n"
    assert not user.data.exists()
    assert VALUE not in "".join(path.read_text() for path in root.rglob("*.log"))
