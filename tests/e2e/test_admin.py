"""Tokens, collections and restorations, as an operator runs them against a mirror in a process of its own."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest

from bdn.core.digest import digest_of
from bdn.core.units import format_size
from tests.doubles.hub import Hub
from tests.support.promises.tally import Tally
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Finished, Shell

TOKEN: Final = "operator-token-7"
FILES: Final = {"config.json": b"{}", "weights": bytes(range(256)) * 5000}
SIZE: Final = sum(map(len, FILES.values()))
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
        return self.does(*command, "--json", code=code).document

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
        found = {file["path"]: self.get(f"/chunks/{file['digest']}").content for file in answer.json()["files"]}
        assert found == FILES
        return True

    def stored(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in (self.data / "store/chunks").rglob("*") if path.is_file()}

    def rows(self) -> list[list[tuple[Any, ...]]]:
        """Of manifests, contents and tombstones."""
        with closing(sqlite3.connect(self.data / "mirror.sqlite")) as connection:
            tables = ("manifests", "contents", "manifest_contents", "tombstones", "events")
            return [sorted(connection.execute(f"SELECT * FROM {table}"), key=repr) for table in tables]

    def has_waited(self, days: float) -> None:
        """As if everything had been mirrored and given up so much earlier."""
        with closing(sqlite3.connect(self.data / "mirror.sqlite", timeout=30)) as connection, connection:
            for table in ("manifests", "tombstones"):
                connection.execute(f"UPDATE {table} SET created_at = created_at - ?", [days * DAY])


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """Whose mirror has a model, and collects when it is told to."""
    root = tmp_path_factory.mktemp("admin")
    with Hub() as hub:
        hub.repo("org/model").commit(FILES)
        cluster = Cluster(root, {"HF_ENDPOINT": hub.url, "BDN_TOKEN": TOKEN})
        with cluster.mirror(BDN_AUTH="token", BDN_COLLECT_SECONDS="0"):
            shell = cluster.shell("operator")
            done = shell.run("bdn", "mirror", "hf://org/model", "--wait", "--json")
            assert done.code == 0, done.out + done.err
            yield Operator(shell, root / "mirror/data", done.document["sources"][0]["manifest"])


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


@pytest.mark.promise("collection")
def test_what_was_evicted_is_restored_or_collected_and_why_says_so(operator: Operator, tally: Tally) -> None:
    assert operator.reads()
    evicted = operator.told("evict", "--source", "hf://org/model", "--tier", "mirror")
    assert (evicted["bytes_freed"], operator.reads()) == (sum(operator.stored().values()), False)
    restored = operator.told("restore", operator.manifest)
    assert [(one["manifest"], one["sources"]) for one in restored["items"]] == [(operator.manifest, ["hf://org/model"])]
    assert operator.reads()
    assert operator.told("restore", "hf://org/model", code=4)["error"]["code"] == "NOT_FOUND"  # nothing is evicted

    stray = operator.data / "store/chunks" / digest_of(b"nobody's").fanout
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"nobody's")
    os.utime(stray, (time.time() - 100 * DAY,) * 2)
    operator.does("evict", "--source", "hf://org/model", "--tier", "mirror")
    operator.has_waited(days=8)
    stored, rows = operator.stored(), operator.rows()
    young = operator.told("gc", "--dry-run", "--grace", "1000d")
    assert [kind["kind"] for kind in young["kinds"] if kind["count"]] == ["manifests"]
    assert young["request"]["grace_seconds"] == 1000 * DAY
    planned = operator.told("gc", "--dry-run")
    assert (operator.stored(), operator.rows()) == (stored, rows)
    assert {kind["kind"]: kind["count"] for kind in planned["kinds"] if kind["count"]} == {"manifests": 1, "chunks": 1}
    assert planned["bytes_freed"] == sum(stored.values())

    collected = operator.told("gc")
    assert (collected["kinds"], collected["bytes_freed"]) == (planned["kinds"], planned["bytes_freed"])
    assert operator.stored() == {}
    assert operator.does("restore", operator.manifest, code=4).out == ""
    operator.does("gc", "--grace", "soon", code=2)
    said = operator.does("why", operator.manifest).out
    assert "is not cached on the mirror because at 20" in said
    assert f"it was collected from the mirror's store: {format_size(SIZE)} were its own" in said
    tally.add(scenarios=3, refused=3)
