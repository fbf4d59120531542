"""``bdn pull`` as users call it, against the doubles, beside the clients that users would otherwise use."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfFileSystem, snapshot_download
from safetensors import safe_open
from safetensors.numpy import save

from node_agent.stage.view.build import can_clone
from tests.doubles.faults import drop
from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Server
from tests.support.agent.mounts import mounted_tmpfs, needs_mounts
from tests.support.content.noise import noise
from tests.support.content.trees import tree
from tests.support.services.commands import Shell

AWS = Path(__file__).parents[2] / ".venv-aws/bin/aws"


def model() -> dict[str, bytes]:
    import numpy as np

    weights = np.arange(3_000_000, dtype=np.float32).reshape(1000, 3000)
    return {
        "config.json": b'{"architectures": ["X"]}',
        "model.safetensors": save({"layer.weight": weights}),
        "nested/deeper/tok+en izer%.json": b"{}",
        "nested/unicode-\u00fc\u4e2d.txt": "\u00fc".encode(),
        "nested/empty.txt": b"",
        ".gitattributes": b"*.safetensors filter=lfs\n",
        "README.md": b"# hello\n",
    }


def test_a_pulled_repository_is_what_snapshot_download_gives_and_readers_of_safetensors_open_it(
    shell: Shell, hub: Hub, tmp_path: Path
) -> None:
    sha = hub.repo("org/model").commit(model())

    pulled = shell.executed().run("bdn", "pull", "hf://org/model", "out")
    snapshot_download("org/model", revision=sha, endpoint=hub.url, token=False, local_dir=tmp_path / "theirs")

    assert pulled.code == 0, pulled.err
    shutil.rmtree(tmp_path / "theirs/.cache")
    assert tree(tmp_path / "out") == tree(tmp_path / "theirs") == model()
    with safe_open(tmp_path / "out/model.safetensors", framework="np") as weights:
        assert list(weights.keys()) == ["layer.weight"]
        assert weights.get_tensor("layer.weight")[999, 2999] == 2_999_999


def test_a_pulled_folder_of_a_hub_s_bucket_is_what_the_hub_s_file_system_reads(
    shell: Shell, hub: Hub, tmp_path: Path
) -> None:
    hub.bucket("org/data", private=True).put({f"models/one/{path}": content for path, content in model().items()})
    theirs = HfFileSystem(endpoint=hub.url, token=hub.token, skip_instance_cache=True)
    folder = "buckets/org/data/models/one"

    pulled = shell.run("bdn", "pull", f"hf://{folder}", "out", "--secret", "hub", "--json", BDN_SECRET_HUB=hub.token)

    assert pulled.code == 0, pulled.out + pulled.err
    read = {path.removeprefix(f"{folder}/"): theirs.open(path).read() for path in theirs.find(folder)}
    assert tree(tmp_path / "out") == read == model()
    again = shell.run("bdn", "pull", f"hf://{folder}", "out", "--secret", "hub", "--json", BDN_SECRET_HUB=hub.token)
    assert (again.code, again.document["bytes_transferred"]) == (0, 0), again.out + again.err
    assert hub.log.count("xet-read-token") == 0


@pytest.mark.skipif(not AWS.exists(), reason="the AWS command line is not installed; make test installs it")
def test_a_pulled_prefix_is_what_the_aws_command_line_put_there(shell: Shell, s3: S3Server, tmp_path: Path) -> None:
    s3.bucket("weights")
    source = tmp_path / "source"
    for path, content in model().items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(content)
    keys = {"AWS_ACCESS_KEY_ID": s3.account.access_key_id, "AWS_SECRET_ACCESS_KEY": s3.account.secret_access_key}
    subprocess.run(
        [AWS, "s3", "cp", "--recursive", "--endpoint-url", s3.url, source, "s3://weights/models/one"],
        env={**shell.environment, **keys, "AWS_DEFAULT_REGION": "us-east-1"},
        check=True,
        capture_output=True,
    )

    secret = json.dumps({name.lower(): value for name, value in keys.items()})
    pulled = shell.run("bdn", "pull", "s3://weights/models/one", "out", "--secret", "keys", BDN_SECRET_KEYS=secret)

    assert pulled.code == 0, pulled.err
    assert tree(tmp_path / "out") == model()


@pytest.mark.production
def test_a_second_pull_moves_no_bytes_and_one_of_a_changed_source_only_those(
    shell: Shell, hub: Hub, tmp_path: Path
) -> None:
    repository = hub.repo("org/model")
    repository.commit(model())
    first = shell.run("bdn", "pull", "hf://org/model", "out", "--json").document
    hub.log.clear()

    second = shell.run("bdn", "pull", "hf://org/model", "out", "--json").document
    elsewhere = shell.run("bdn", "pull", "hf://org/model", "elsewhere", "--json").document

    size = sum(len(content) for content in model().values())
    assert (first["bytes_transferred"], first["bytes_from"]) == (size, {"node": 0, "cluster": 0, "mirror": size})
    assert (second["bytes_transferred"], second["bytes_from"]) == (0, {"node": size, "cluster": 0, "mirror": 0})
    expected_from = {"node": size, "cluster": 0, "mirror": 0}
    assert (elsewhere["bytes_transferred"], elsewhere["bytes_from"]) == (0, expected_from)
    assert hub.log.bytes_served("/resolve/") == 0
    assert hub.log.count(origin="cdn") == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "elsewhere") == model()
    assert not (tmp_path / "out/model.safetensors").samefile(tmp_path / "elsewhere/model.safetensors")

    repository.commit({"README.md": b"# changed\n", "config.json": None})
    again = shell.run("bdn", "pull", "hf://org/model", "out", "--json")
    assert again.code == 0, again.err
    assert again.document["bytes_transferred"] == len(b"# changed\n")
    expected = {path: content for path, content in model().items() if path != "config.json"}
    assert tree(tmp_path / "out") == {**expected, "README.md": b"# changed\n"}


def test_what_is_held_is_pulled_while_the_hub_is_away(shell: Shell, hub: Hub, tmp_path: Path) -> None:
    """A commit without asking, a branch with --offline, as it was known last."""
    repository, old = hub.repo("org/model"), {"config.json": b"old"}
    sha = repository.commit(old)
    shell.run("bdn", "pull", "hf://org/model", "first")
    shell.run("bdn", "pull", "hf://org/model", "json", "--allow", "*.json")
    new = repository.commit({"config.json": b"new"})
    shell.run("bdn", "pull", "hf://org/model", "first")
    hub.log.clear()
    hub.fail(drop(), times=None)

    pinned = shell.run("bdn", "pull", f"hf://org/model@{sha}", "pinned", "--json")
    assert hub.log.count() == 0
    away = shell.run("bdn", "pull", "hf://org/model", "out")
    hub.log.clear()
    offline = shell.run("bdn", "pull", "hf://org/model", "out", "--offline", "--json")
    narrow = shell.run("bdn", "pull", "hf://org/model", "narrow", "--allow", "*.json", "--offline", "--json")
    unknown = [
        shell.run("bdn", "pull", name, "none", "--offline", "--json", *rest)
        for name, *rest in (["hf://org/other"], ["hf://org/model@v1"], ["hf://org/model", "--allow", "*.txt"])
    ]

    assert (pinned.code, pinned.document["resolved_revision"]) == (0, sha), pinned.err
    assert tree(tmp_path / "pinned") == old
    assert (away.code, f"held here, for --offline: hf://org/model at {new}" in away.err) == (1, True), away.err
    assert (offline.code, offline.document["resolved_revision"], offline.document["bytes_transferred"]) == (0, new, 0)
    assert f"offline: hf://org/model at {new}, as mirrored 20" in offline.err
    assert (tree(tmp_path / "out"), tree(tmp_path / "narrow")) == ({"config.json": b"new"}, old)
    assert narrow.document["resolved_revision"] == sha
    assert [(done.code, done.document["error"]["code"]) for done in unknown] == [(4, "NOT_FOUND")] * 3
    assert hub.log.count() == 0


def test_pull__with_a_variable_that_forbids_the_hub__serves_what_is_held_and_names_it(
    shell: Shell, hub: Hub, tmp_path: Path
) -> None:
    hub.repo("org/model").commit({"config.json": b"held"})
    hub.repo("org/other").commit({"config.json": b"new"})
    forbidden = replace(shell, extra={**shell.extra, "HF_HUB_OFFLINE": "1"})
    new = forbidden.run("bdn", "pull", "hf://org/model", "out")
    asked_before = hub.log.count()
    shell.run("bdn", "pull", "hf://org/model", "first")
    hub.log.clear()

    held = forbidden.run("bdn", "pull", "hf://org/model", "out")
    other = forbidden.run("bdn", "pull", "hf://org/other", "other")

    assert (held.code, tree(tmp_path / "out")) == (0, {"config.json": b"held"}), held.err
    for done in (new, other):
        assert (done.code, "(pull it without HF_HUB_OFFLINE=1)" in done.err) == (4, True), done.err
    assert (asked_before, hub.log.count()) == (0, 0)


@pytest.mark.embedded("a mirror that runs nowhere is known by its SQLite")
def test_what_a_pull_left_is_explained_and_verified_without_a_service(shell: Shell, hub: Hub, tmp_path: Path) -> None:
    hub.repo("org/model").commit({"config.json": b"{}"})
    assert shell.run("bdn-admin", "why", "out/config.json").code != 0  # nothing is here, and nothing is made
    assert not (shell.data / "mirror.sqlite").exists()
    shell.run("bdn", "pull", "hf://org/model", "out")
    hub.log.clear()

    why = shell.run("bdn-admin", "why", "out/config.json")
    verified = shell.run("bdn-admin", "verify", "out", "--json")

    assert (why.code, "hf://org/model" in why.out) == (0, True), why.out + why.err
    assert (verified.code, verified.document["chunks_read"], verified.document["items"]) == (0, 2, []), verified.err
    assert hub.log.count() == 0


def test_a_pull_of_something_else_lets_no_file_go_unless_it_may(shell: Shell, hub: Hub, tmp_path: Path) -> None:
    repository, whole = hub.repo("org/model"), {f"{number}.bin": bytes([number]) for number in range(8)}
    repository.commit({"config.json": b"{}", **whole})
    hub.repo("org/other").commit({"config.json": b"{ }", **whole})
    shell.run("bdn", "pull", "hf://org/model", "out")
    before = tree(tmp_path / "out")

    narrower = shell.run("bdn", "pull", "hf://org/model", "out", "--allow", "*.json")
    other = shell.run("bdn", "pull", "hf://org/other", "out", "--json")
    assert (narrower.code, other.code, other.document["error"]["code"]) == (2, 2, "INVALID_REQUEST")
    assert "would remove or replace 0.bin, 1.bin, 2.bin, 3.bin, 4.bin and 3 more; add --replace" in narrower.err
    assert "would remove or replace config.json; add --replace" in other.out
    assert tree(tmp_path / "out") == before

    assert shell.run("bdn", "pull", "hf://org/model", "out", "--allow", "*.json", "--replace").code == 0
    assert tree(tmp_path / "out") == {"config.json": b"{}"}
    wider = shell.run("bdn", "pull", "hf://org/model", "out")  # nothing goes
    assert (wider.code, tree(tmp_path / "out")) == (0, before), wider.err


# --- What a pull would do, and whether it fits ---

MB = 1_000_000


def everything(root: Path) -> dict[str, tuple[bool, int]]:
    """Every file below a directory by path, and when it changed last."""
    return {str(path): (path.is_file(), path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file()}


@pytest.mark.embedded("a bucket has any room, and a mirror that runs nowhere is known by its SQLite")
def test_a_dry_run_says_what_a_pull_would_do_and_does_nothing(shell: Shell, hub: Hub, tmp_path: Path) -> None:
    hub.repo("org/model").commit(model())
    size = sum(map(len, model().values()))

    planned = shell.run("bdn", "pull", "hf://org/model", "out", "--dry-run", "--json")

    assert planned.code == 0, planned.err
    said = planned.document
    assert (said["files_total"], said["bytes_total"], said["bytes_to_transfer"]) == (len(model()), size, size)
    assert (said["bytes_held"], said["is_there"], said["removed"], said["replaced"]) == (0, False, [], [])
    trees = 2 if can_clone(tmp_path, tmp_path) else 3  # in the store, in the cache and, where it is a copy, at DEST
    assert sum(room["bytes_needed"] for room in said["room"]) == trees * size
    assert all(room["bytes_free"] > room["bytes_needed"] for room in said["room"])
    assert not (tmp_path / "out").exists()
    assert (hub.log.bytes_served("/resolve/"), hub.log.count(origin="cdn")) == (0, 0)
    assert not [path for path in (shell.data / "store/chunks").rglob("*") if path.is_file()]
    assert not list((shell.data / "cache/files").glob("*/*"))
    assert shell.run("bdn-admin", "ls", "--json").document["items"] == []
    people = shell.run("bdn", "pull", "hf://org/model", "out", "--dry-run")
    assert (people.code, "would come from the upstream" in people.out, " free: " in people.out) == (0, True, True)


def test_a_dry_run_says_what_is_there_and_what_would_go(shell: Shell, hub: Hub, tmp_path: Path) -> None:
    repository = hub.repo("org/model")
    sha = repository.commit({"a.json": b"1", "b.json": b"2", "c.bin": b"3"})
    hub.repo("org/other").commit({"a.json": b"other", "c.bin": b"3"})
    assert shell.run("bdn", "pull", "hf://org/model", "out").code == 0
    before = everything(tmp_path / "out")

    def planned(*asked: str) -> dict[str, Any]:
        done = shell.told("bdn", "pull", *asked, "--dry-run")
        assert everything(tmp_path / "out") == before
        return dict(done)

    for source in ("hf://org/model", f"hf://org/model@{sha}"):
        same = planned(source, "out")
        assert (same["is_there"], same["room"], same["bytes_to_transfer"], same["bytes_held"]) == (True, [], 0, 3)
        elsewhere = planned(source, "new")
        assert (elsewhere["is_there"], len(elsewhere["room"])) == (False, 1)
    other = planned("hf://org/other", "out")
    # Nobody has read the other c.bin yet, and knows that it is the same.
    assert (other["removed"], other["replaced"], other["replace_needed"]) == (["b.json"], ["a.json", "c.bin"], True)
    narrower = planned("hf://org/model", "out", "--allow", "*.json")
    assert (narrower["removed"], narrower["replaced"], narrower["replace_needed"]) == (["c.bin"], [], True)
    repository.commit({"b.json": None, "c.bin": b"4"})
    update = planned("hf://org/model", "out")
    assert (update["removed"], update["replaced"], update["replace_needed"]) == (["b.json"], ["c.bin"], False)
    assert (update["bytes_to_transfer"], update["bytes_held"]) == (1, 1)


def test_a_dry_run_ends_in_the_error_of_the_pull(shell: Shell, hub: Hub, tmp_path: Path) -> None:
    hub.repo("org/model").commit({"config.json": b"{}"})
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied/mine.txt").write_text("mine")
    for asked, code in (
        ("hf://org/model occupied", "INVALID_REQUEST"),
        ("hf://org/absent out", "AUTH_REQUIRED"),
        ("hf://org/model out --allow *.nope", "NO_FILES_MATCHED"),
        ("hf://org/model out --offline", "NOT_FOUND"),
    ):
        real, dry = (shell.run("bdn", "pull", *asked.split(), "--json", *more) for more in ((), ("--dry-run",)))
        assert (dry.code, dry.document["error"]["code"]) == (real.code, code)


def test_pull__destination_cannot_be__is_refused_before_the_hub_is_asked(
    shell: Shell, hub: Hub, tmp_path: Path
) -> None:
    hub.repo("org/model").commit(model())
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    reasons = {
        "file": "it is a file",
        "file/model": "a part of the path is a file",
        "loop": "its symbolic links form a loop",
        f"new/{'n' * 300}": "a name in it is too long",
    }

    for destination, reason in reasons.items():
        refused = shell.run("bdn", "pull", "hf://org/model", destination)
        assert (refused.code, "Traceback" in refused.err) == (2, False), refused.err
        assert reason in refused.err

    assert hub.log.count() == 0


@needs_mounts
@pytest.mark.parametrize("is_dry", [False, True], ids=["pull", "dry-run"])
@pytest.mark.embedded("a bucket has any room")
@pytest.mark.parametrize("offline", [False, True], ids=["cold", "held"])
def test_what_cannot_fit_is_refused_with_figures_before_its_first_byte(
    hub: Hub, tmp_path: Path, is_dry: bool, offline: bool
) -> None:
    """The store and the cache on one file system, and DEST on another one."""
    hub.repo("org/small").commit({"weights.bin": noise(20 * MB, 1)})
    hub.repo("org/model").commit({"weights.bin": noise(40 * MB, 2)})
    dry = ["--dry-run"] if is_dry else []
    with mounted_tmpfs(tmp_path / "disk", "72m") as disk, mounted_tmpfs(tmp_path / "other", "16m") as other:
        shell = Shell(disk, {"HF_ENDPOINT": hub.url}, is_forked=True)
        if offline:
            assert shell.run("bdn", "pull", "hf://org/small", "here").code == 0
            dry += ["--offline"]
        hub.log.clear()

        there = shell.run("bdn", "pull", "hf://org/small", str(other / "out"), "--json", *dry)
        assert (there.code, there.document["error"]["code"]) == (1, "NO_ROOM"), there.out + there.err
        assert f"20 MB are needed and 16.8 MB free: 20 MB for copies at {other}/out" in there.out
        if not offline:
            both = shell.run("bdn", "pull", "hf://org/model", "out", "--link", "--json", *dry)
            assert (both.code, both.document["error"]["code"]) == (1, "NO_ROOM"), both.out + both.err
            assert (
                "80 MB are needed and 6" in both.out
            )  # what the cache leaves to others, and to its cluster, is not free
            assert f"40 MB for the store at {disk}/data/store, 40 MB for the cache at {disk}/data/cache" in both.out
            too_large = shell.run("bdn", "pull", "hf://org/model", "out", "--json", *dry, BDN_AGENT_CACHE_BYTES="30MB")
            assert too_large.document["error"]["code"] == "CACHE_TOO_SMALL"
        assert hub.log.bytes_served("/resolve/") + hub.log.count(origin="cdn") == 0
        assert list(other.iterdir()) == []


@needs_mounts
@pytest.mark.embedded("a bucket has any room")
def test_pull__without_reflinks__is_refused_if_the_copy_has_no_room_and_fits_with_links(
    hub: Hub, tmp_path: Path
) -> None:
    hub.repo("org/model").commit({"weights.bin": noise(30 * MB, 2), "b": noise(20, 3)})
    with mounted_tmpfs(tmp_path / "disk", "72m") as disk:
        shell = Shell(disk, {"HF_ENDPOINT": hub.url}, is_forked=True)
        copied = shell.run("bdn", "pull", "hf://org/model", "out", "--json")
        assert (copied.code, copied.document["error"]["code"]) == (1, "NO_ROOM"), copied.out
        assert re.search(r"90 MB are needed and 7\d(\.\d)? MB", copied.out), copied.out
        assert "one file system, with reflinks (xfs, btrfs) or with --link" in copied.out
        assert hub.log.bytes_served("/resolve/") == 0
        linked = shell.run("bdn", "pull", "hf://org/model", "out", "--link", "--json")
        assert (linked.code, linked.document["view"]) == (0, "hardlink"), linked.err
        again = shell.run("bdn", "pull", "hf://org/model", "out", "--link", "--json")
        assert (again.code, again.document["bytes_from"]["node"]) == (0, 30 * MB + 20)


BAD_INPUT = [
    ("ftp://host/path out", "INVALID_SOURCE", 2),
    ("s3://bucket@v2/prefix out", "INVALID_SOURCE", 2),
    ("s3://nowhere/prefix out", "SOURCE_NOT_FOUND", 4),
    ("hf://org/model@nope out", "REVISION_NOT_FOUND", 4),
    ("hf://org/private out", "AUTH_REQUIRED", 1),
    ("hf://org/private out --secret absent", "SECRET_NOT_FOUND", 4),
    ("s3://weights/x out --secret broken", "SECRET_MALFORMED", 1),
    ("hf://org/model out --allow *.nope", "NO_FILES_MATCHED", 1),
    ("hf://org/empty out", "NO_FILES_MATCHED", 1),
    ("hf://org/model occupied", "INVALID_REQUEST", 2),
    ("hf://buckets/org/none out", "AUTH_REQUIRED", 1),
    ("hf://buckets/org/data/none out", "NO_FILES_MATCHED", 1),
    ("hf://buckets/org/data@main out", "INVALID_SOURCE", 2),
]


def test_bad_input_is_named_and_leaves_nothing_behind(shell: Shell, hub: Hub, s3: S3Server, tmp_path: Path) -> None:
    hub.repo("org/model").commit({"config.json": b"{}"})
    hub.repo("org/private", private=True).commit({"config.json": b"{}"})
    hub.repo("org/empty").commit({})
    hub.bucket("org/data").put({"a": b"x"})
    s3.bucket("weights")
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied/mine.txt").write_text("mine")
    broken = '{"aws_access_key_id": "AKIA"}'
    for arguments, code, exit_code in BAD_INPUT:
        done = shell.run("bdn", "pull", *arguments.split(), "--json", BDN_SECRET_BROKEN=broken)

        assert (done.code, done.document["error"]["code"]) == (exit_code, code), done.out + done.err
        assert done.document["error"]["message"]
        assert not (tmp_path / "out").exists()
        assert tree(tmp_path / "occupied") == {"mine.txt": b"mine"}
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
