"""What operators type: tokens, secrets, collections, restorations, and a cluster cache of its own."""

import contextlib
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest

from bdn.core.chunk import digest_of
from bdn.core.manifest import Root, files_of
from tests.doubles.hub import Hub
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.mirror.backends import Behind, behind
from tests.support.promises.tally import Tally
from tests.support.services.cluster import Cluster
from tests.support.services.commands import SCRIPTS, Finished, Shell

TOKEN: Final = "operator-token-7"
FILES: Final = {"config.json": b"{}", "weights": bytes(range(256)) * 5000}
DAY: Final = 86400.0


@dataclass(frozen=True)
class Operator:
    """Somebody with the operator's token, and a look at what the mirror has."""

    shell: Shell
    data: Path
    manifest: str

    def does(self, *command: str, code: int = 0) -> Finished:
        done = self.shell.run("bdn-admin", *command)
        assert done.code == code, done.out + done.err
        return done

    def told(self, *command: str, code: int = 0) -> Any:
        return self.shell.told("bdn-admin", *command, code=code)

    def get(self, path: str, token: str = TOKEN) -> httpx2.Response:
        return httpx2.get(
            f"{self.shell.extra['BDN_URL']}{path}", headers={"Authorization": f"Bearer {token}"}, trust_env=False
        )

    def reads(self) -> bool:
        """Whether it has the manifest, and every byte of it."""
        answer = self.get(f"/manifests/{self.manifest}")
        if answer.status_code == 404:
            return False
        assert str(digest_of(answer.content)) == self.manifest
        pages = [self.get(f"/chunks/{page.digest}").content for page in Root.parse(answer.content).pages]
        for file in files_of(pages):
            content = b"".join(self.get(f"/chunks/{chunk}").content for chunk in file.layout.fetched)
            assert FILES[file.path] in content
        return True

    @property
    def behind(self) -> Behind:
        return behind(self.data)

    def rows(self) -> dict[str, list[tuple[Any, ...]]]:
        """Of manifests, chunks and tombstones."""
        return self.behind.rows("manifests", "chunks", "chunk_sets", "set_chunks", "tombstones", "events")

    def has_waited(self, days: float) -> None:
        """As if everything had been mirrored and given up so much earlier."""
        for table in ("manifests", "tombstones"):
            self.behind.query(f"UPDATE {table} SET created_at = created_at - ?", days * DAY)


@pytest.fixture(scope="module")
def operator(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """Whose mirror has a model, and collects when it is told to."""
    root = tmp_path_factory.mktemp("admin")
    with Hub() as hub:
        hub.repo("org/model").commit(FILES)
        cluster = Cluster(root, {"HF_ENDPOINT": hub.url, "BDN_TOKEN": TOKEN})
        with cluster.mirror(BDN_AUTH="token", BDN_COLLECT_SECONDS="0"):
            shell = cluster.shell("operator")
            done = shell.told("bdn", "mirror", "hf://org/model", "--wait")
            yield Operator(shell, root / "mirror/data", done["sources"][0]["manifest"])


@pytest.mark.production
@pytest.mark.promise("access")
def test_a_token_is_good_until_it_is_revoked(operator: Operator, tally: Tally) -> None:
    made = operator.told("tokens", "create", "ci", "--organisation", "acme", "--role", "controller", "--expires", "90d")
    token = made["token"]
    assert (made["organisation"], made["role"], made["revoked_at"]) == ("acme", "controller", None)
    assert operator.get("/mirror", token).status_code == 200

    listed = operator.told("tokens", "ls")
    assert [(one["id"], one["name"], one["revoked_at"]) for one in listed["items"]] == [(made["id"], "ci", None)]
    assert "token" not in listed["items"][0]

    revoked = operator.told("tokens", "revoke", made["id"])
    assert (revoked["id"], revoked["revoked_at"] is not None) == (made["id"], True)
    answer = operator.get("/mirror", token)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "UNAUTHENTICATED")
    unknown = operator.told("tokens", "revoke", f"tok_{'0' * 24}", code=4)
    assert unknown["error"]["code"] == "NOT_FOUND"
    assert token not in "".join(path.read_text() for path in operator.data.parent.rglob("*.log"))
    tally.add(scenarios=1, refused=2)


@pytest.mark.production
@pytest.mark.promise("collection")
def test_what_was_evicted_is_restored_or_collected_and_why_says_so(operator: Operator, tally: Tally) -> None:
    assert operator.reads()
    evicted = operator.told("evict", "hf://org/model", "--tier", "mirror")
    assert (evicted["bytes_freed"], operator.reads()) == (sum(operator.behind.chunks().values()), False)
    restored = operator.told("restore", operator.manifest)
    assert [(one["manifest"], one["sources"]) for one in restored["items"]] == [(operator.manifest, ["hf://org/model"])]
    assert operator.reads()
    assert operator.told("restore", "hf://org/model", code=4)["error"]["code"] == "NOT_FOUND"  # nothing is evicted

    with operator.behind.chunk(digest_of(b"nobody's")) as stray:
        stray.write_bytes(b"nobody's")
    operator.does("evict", "hf://org/model", "--tier", "mirror")
    operator.has_waited(days=8)
    stored, rows = operator.behind.chunks(), operator.rows()
    young = operator.told("gc", "--dry-run", "--grace", "1000d")
    assert [kind["kind"] for kind in young["kinds"] if kind["count"]] == ["manifests", "chunks"]  # they had their grace
    assert young["request"]["grace_seconds"] == 1000 * DAY
    planned = operator.told("gc", "--dry-run", "--grace", "0s")
    assert (operator.behind.chunks(), operator.rows()) == (stored, rows)
    counts = {kind["kind"]: kind["count"] for kind in planned["kinds"] if kind["count"]}
    assert counts == {"manifests": 1, "chunks": len(stored) - 1}
    assert planned["bytes_freed"] == sum(stored.values()) - len(b"nobody's")
    orphans = operator.told("gc", "--orphans", "--grace", "0s", "--dry-run")
    assert {kind["kind"]: kind["bytes"] for kind in orphans["kinds"] if kind["count"]} == {"chunks": len(b"nobody's")}

    collected = operator.told("gc", "--grace", "0s")
    assert (collected["kinds"], collected["bytes_freed"]) == (planned["kinds"], planned["bytes_freed"])
    assert list(operator.behind.chunks().values()) == [len(b"nobody's")]  # a collection does not list the store
    assert operator.told("gc", "--orphans")["bytes_freed"] == len(b"nobody's")
    assert operator.behind.chunks() == {}
    assert operator.does("restore", operator.manifest, code=4).out == ""
    operator.does("gc", "--grace", "soon", code=2)
    said = operator.does("why", operator.manifest).out
    assert "is not cached on the mirror because at 20" in said
    assert "it was collected from the mirror's store, which freed " in said
    tally.add(scenarios=3, refused=3)


# --- ``bdn-admin secrets``, as a user types it ---
of_a_pull = pytest.mark.embedded("a mirror that runs nowhere is known by its SQLite")
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


@of_a_pull
def test_a_secret_set_before_the_first_pull_opens_a_private_repository(keyed: Shell, hub: Hub) -> None:
    hub.repo("org/private", private=True).commit({"a.txt": b"1"})
    (keyed.root / "token").write_text(f"{hub.token}\n")
    done = keyed.run("bdn-admin", "secrets", "set", "team-token", "--from-file", "token", "--json")
    assert (done.code, done.document["name"]) == (0, "team-token"), done.err
    pulled = keyed.run("bdn", "pull", "hf://org/private", "out", "--secret", "team-token", "--json")
    assert pulled.code == 0, pulled.out + pulled.err
    assert tree(keyed.root / "out") == {"a.txt": b"1"}

    listed = keyed.run("bdn-admin", "secrets", "ls")
    assert listed.out.splitlines()[1].startswith("team-token  20")
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


@of_a_pull
def test_a_value_comes_from_standard_input_and_wrong_ones_are_refused_at_once(keyed: Shell, hub: Hub) -> None:
    assert given(keyed, b"", "empty").code == 2
    assert "is empty" in given(keyed, b"\n", "empty").err
    assert "is not text" in given(keyed, b"\xff\xfe", "binary").err
    assert "over the limit of 65536" in given(keyed, b"x" * 70_000, "long").err
    assert "begins like a JSON object" in given(keyed, f"{{{VALUE}".encode(), "json").err
    misnamed = given(keyed, b"x", "a/b")
    assert (misnamed.code, "cannot name a secret" in misnamed.err) == (2, True)
    assert not keyed.data.exists()  # nothing was started for them
    hub.repo("org/private", private=True).commit({"a.txt": b"1"})
    assert given(keyed, f"{hub.token}\r\n".encode(), "good").code == 0
    pulled = keyed.run("bdn", "pull", "hf://org/private", "out", "--secret", "good")
    assert (pulled.code, tree(keyed.root / "out")) == (0, {"a.txt": b"1"}), pulled.err  # without the line's end
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
        assert rotated.splitlines()[1].startswith("team  20")
        assert rotated.endswith(
            "all secrets are encrypted with the first key: remove the older keys from BDN_SECRETS_KEY\n"
        )
        of_one = user.run("bdn-admin", "secrets", "rotate", BDN_ORGANISATION="acme").out
        assert (
            of_one
            == "only the secrets of this organisation were checked; secrets of other organisations may still need the older keys\n"
        )
    assert not user.data.exists()
    assert VALUE not in "".join(path.read_text() for path in root.rglob("*.log"))


# --- A cluster cache of its own, as an operator runs one: it feeds a node, and is emptied by command ---
MODEL = {"config.json": b"{}", "model.safetensors": noise(17 * MIB + 3, 1), "small.bin": b"one" * 999}
MODEL_BYTES = sum(map(len, MODEL.values()))


def test_a_node_is_fed_by_the_cluster_cache_and_the_cache_is_emptied_by_command(tmp_path: Path, hub: Hub) -> None:
    hub.repo("org/model").commit(MODEL)
    cluster = Cluster(tmp_path, {"HF_ENDPOINT": hub.url})
    with (
        cluster.mirror(),
        cluster.agent("cache", BDN_AGENT_ROLES="cluster"),
        cluster.agent("node", BDN_AGENT_ROLES="node") as node,
    ):
        mirror = node.run("bdn", "mirror", "hf://org/model", "--mount", "/app/model", "--wait", "--json").document
        stage = node.run("bdn", "stage", mirror["id"], "--job", "train", "--json").document
        assert stage["mounts"][0]["bytes_from"] == {"node": 0, "cluster": MODEL_BYTES, "mirror": 0}
        assert tree(Path(stage["mounts"][0]["path"])) == MODEL

        (item,) = node.told("bdn-admin", "evict", "hf://org/model", "--tier", "cluster")["items"]
        assert (item["tier"], item["node"], item["refused"]) == ("cluster", "cache", False)
        assert MODEL_BYTES < item["bytes"] < MODEL_BYTES + 10_000  # and a page
        assert not list((tmp_path / "cache" / "data").rglob("cluster/chunks/*"))
        assert tree(Path(stage["mounts"][0]["path"])) == MODEL  # what the node holds is another tier's
