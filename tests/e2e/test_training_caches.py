"""Training caches by the commands: on nodes that share a volume, measured, emptied, limited, and gone with their project."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from bdn.wire.grants import CacheGrant
from node_agent.disk.trash import Trash
from node_agent.job.cache_volume import CacheVolume
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Shell, wait_until

OLD: Final = "user_artifacts/old"


def told(shell: Shell, *words: str, code: int = 0) -> Any:
    return shell.told("bdn-admin", "cache", *words, code=code)


def asked(shell: Shell, path: str, *options: str) -> Any:
    """As a command of a node asks its agent."""
    command = ["curl", "-sS", "--unix-socket", shell.extra["BDN_AGENT_SOCKET"], *options, f"http://agent/{path}"]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def volume_of(shell: Shell) -> str:
    return str(asked(shell, "shared-caches")["volume_id"])


def granted(cluster: Cluster, volume_id: str, code: int = 201, project: str = "llama") -> Any:
    body = {"project": project, "cluster": "default", "volume_id": volume_id}
    with cluster.http() as mirror:
        answer = mirror.post("/caches", json=body)
    assert answer.status_code == code, answer.text
    return answer.json()


def opened(root: Path, grant: Any) -> Path:
    """The project's directory, as the agent opens it for a job."""
    allowed = CacheGrant("default", grant["project_id"], grant["team_id"], "default", "v", 0.0)
    return Path(CacheVolume(root, Trash(root / ".trash")).open(allowed, huggingface=False).project)


@pytest.mark.production
def test_a_cache_is_measured_emptied_and_limited(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"BDN_AGENT_VOLUME_ROOT": str(tmp_path / "shared"), "BDN_CACHE_BYTES": "1KB"})
    with cluster.mirror(), cluster.agent("node-1") as one, cluster.agent("node-2") as two:
        assert told(one, "ls") == {"items": [], "removals": []}
        volume_id = volume_of(one)
        assert volume_of(two) == volume_id
        grant = granted(cluster, volume_id)
        project = opened(tmp_path / "shared", grant)
        (project / "old").mkdir()
        (project / 'old/a,"b"').write_bytes(b"x" * 2000)
        (project / "link").symlink_to("old")

        summary = told(two, "summarize", "llama")
        assert [(one["path"], one["size_bytes"]) for one in summary["file_summaries"]] == [
            ("user_artifacts", 0), ("user_artifacts/link", 3), (OLD, 0), (f'{OLD}/a,"b"', 2000),
        ]  # fmt: skip
        done = two.run("bdn-admin", "cache", "summarize", "llama", "--csv")
        assert done.out.splitlines()[0] == "path,size_bytes,modified,file_type,permissions"
        assert done.out.splitlines()[-1].startswith('"user_artifacts/old/a,""b""",2000,')
        done = two.run("bdn-admin", "cache", "summarize", grant["project_id"])
        assert done.out.splitlines()[-1] == "4 entries, 2 KB"
        assert granted(cluster, volume_id, code=507)["error"]["code"] == "CACHE_OVER_QUOTA"
        assert re.search(r" 2 KB +1 KB +2 ", one.run("bdn-admin", "cache", "ls").out)

        assert told(one, "set", "llama", "--bytes", "3KB")["limit_bytes"] == 3000
        granted(cluster, volume_id)
        assert told(one, "rm", "llama", OLD) == {"project_id": grant["project_id"], "path": OLD}
        assert sorted(path.name for path in project.iterdir()) == ["link"]
        assert told(one, "rm", "llama", OLD, code=4)["error"]["code"] == "NOT_FOUND"
        assert told(one, "rm", "mistral", OLD, code=4)["error"]["code"] == "NOT_FOUND"
        assert told(one, "rm", "llama", "../..", code=2)["error"]["code"] == "INVALID_REQUEST"
        where = grant["cluster"]
        assert told(one, "forget", "llama", "--cluster", where)["directories"] == []
        assert told(one, "forget", "llama", "--cluster", where, code=4)["error"]["code"] == "NOT_FOUND"


def test_the_cache_of_a_deleted_project_goes_when_its_cluster_is_back(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {})
    root = tmp_path / "node-1/data/volumes"
    with cluster.mirror():
        with cluster.agent() as node:
            volume_id = volume_of(node)
            kept, gone = (granted(cluster, volume_id, project=name) for name in ("kept", "gone"))
            project, others = opened(root, gone), opened(root, kept)
            (project / "x").write_bytes(b"")
        assert cluster.shell().told("bdn-admin", "projects", "rm", "gone")["id"] == gone["project_id"]
        found = told(cluster.shell(), "ls")
        assert [one["project_name"] for one in found["items"]] == ["kept"]
        assert [(one["project_id"], one["state"]) for one in found["removals"]] == [(gone["project_id"], "PENDING")]
        assert project.exists()

        with cluster.agent() as node:
            wait_until(lambda: not told(node, "ls")["removals"], what="the removal")
            assert not project.parent.exists()
            assert others.exists()
            wait_until(lambda: not list((root / ".trash").iterdir()), what="the empty trash")


def test_a_cache_stays_while_a_job_of_another_node_uses_it_and_no_earlier_grant_brings_it_back(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    cluster = Cluster(tmp_path, {"BDN_AGENT_VOLUME_ROOT": str(root)})

    def in_use(*words: str) -> str:
        error = other.told("bdn-admin", *words, code=3)["error"]
        assert error["code"] == "IN_USE"
        return str(error["message"])

    with cluster.mirror(), cluster.agent("node-2") as other:
        with cluster.agent("node-1") as node:
            earlier = granted(cluster, volume_of(other))["grant"]
            done = node.run(
                "bdn", "volumes", "create", "--job", "job-1", "--scratch", "64MB", "--cache", "llama", "--json"
            )
            job = done.document["environment"]
            project, team = Path(job["BT_PROJECT_CACHE_DIR"]), Path(job["BT_TEAM_CACHE_DIR"])
            for path in (project / "x", project / "y", team / "z"):
                path.write_bytes(b"")
            for words in (("projects", "rm", "llama"), ("cache", "rm", "llama", "user_artifacts/x")):
                assert in_use(*words).endswith(f"is in use by {job['BDN_JOB_VOLUME']} on node-1")
            told(other, "rm", "llama", "user_artifacts/y", "--force")
        assert "on node-1 (silent since " in in_use("projects", "rm", "llama")  # its agent has stopped, its job goes on
        assert [path.name for path in project.iterdir()] == ["x"]
        with cluster.agent("node-1") as node:
            assert node.run("bdn", "volumes", "rm", "--job", "job-1").code == 0
            wait_until(lambda: other.run("bdn-admin", "projects", "rm", "llama").code == 0, what="the unused cache")
            wait_until(lambda: not told(other, "ls")["removals"], what="the removal")
        wait_until(lambda: not list((root / ".trash").iterdir()), what="the empty trash")
        body = json.dumps({"run_id": "job-2", "rank": 0, "scratch_bytes": 64_000_000, "cache_grant": earlier})
        refused = asked(other, "job-volumes", "-H", "Content-Type: application/json", "-d", body)
        assert refused["error"]["code"] == "GRANT_INVALID"
        assert [path.name for path in project.parents[1].iterdir()] == [f"{project.parent.name}.gone"]
        assert (team / "z").exists()
