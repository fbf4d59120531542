"""``bdn pull --hub-cache``: unmodified clients of the hub find the repository in their cache, offline, by its name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name

from tests.doubles.faults import drop
from tests.doubles.hub import Hub
from tests.doubles.hub_repository import HubRepository, Kind
from tests.support.agent.mounts import mounted_tmpfs, needs_mounts
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.services.commands import Finished, Shell

FILES = {
    "config.json": b'{"model_type": "bert"}',
    "model.safetensors": noise(9 * MIB + 1, 1),
    "small.safetensors": b"small, and in LFS",
    "same.safetensors": b"small, and in LFS",
    "nested/deeper/tok+en izer%.json": b"{}",
    "nested/unicode-\u00fc\u4e2d.txt": "\u00fc".encode(),
    "nested/empty.txt": b"",
    ".gitattributes": b"*.safetensors filter=lfs\n",
}
WIDE = ("**/*.json", "**/*.safetensors")  # for these, the whole commit is listed anyway
NARROW = ("config.json", "nested/deeper/*")  # for these, only a part
SELECTIONS = pytest.mark.parametrize("allow", [WIDE, NARROW], ids=["wide", "narrow"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def user(shell: Shell, root: Path) -> Shell:
    return replace(shell, extra={**shell.extra, "HF_HUB_CACHE": str(root), "HF_HUB_DISABLE_UPDATE_CHECK": "1"})


def pull(user: Shell, source: str, *options: str, allow: tuple[str, ...] = ()) -> Any:
    selection = [part for pattern in allow for part in ("--allow", pattern)]
    return user.told("bdn", "pull", source, *selection, *options, "--hub-cache")


def offline(root: Path, revision: str | None = None, repo_id: str = "org/model", **options: Any) -> dict[str, bytes]:
    found = snapshot_download(repo_id, revision=revision, cache_dir=root, local_files_only=True, **options)
    return tree(Path(found))


def online(hub: Hub, root: Path, repo_id: str = "org/model", **options: Any) -> dict[str, bytes]:
    return tree(Path(snapshot_download(repo_id, cache_dir=root, endpoint=hub.url, token=False, **options)))


def hf(user: Shell, *command: str) -> Finished:
    done = user.executed().run("hf", *command)
    assert done.code == 0, done.out + done.err
    return done


def layout(folder: Path) -> dict[str, object]:
    """What a repository's folder consists of: links as they are written, listings parsed, other files by content."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = json.loads(path.read_bytes()) if path.suffix == ".json" else path.read_bytes()
    return found


@pytest.mark.parametrize(("kind", "source"), [("model", "hf://org/model"), ("dataset", "hf://datasets/org/model"),
                                              ("space", "hf://spaces/org/model")])  # fmt: skip
def test_a_pulled_repository_is_what_the_client_itself_makes_but_without_xet(
    user: Shell, hub: Hub, root: Path, tmp_path: Path, kind: Kind, source: str
) -> None:
    repository = hub.repo("org/model", kind=kind)
    sha = repository.commit(FILES)
    theirs = tmp_path / "theirs"
    online(hub, theirs, repo_type=kind)

    pulled = pull(user, source)

    folder = repo_folder_name(repo_id="org/model", repo_type=kind)
    assert layout(root / folder) == layout(theirs / folder)
    assert pulled["destination"] == str(root / folder / "snapshots" / sha)
    assert tree(Path(pulled["destination"])) == FILES
    verified = user.told("bdn-admin", "verify", pulled["destination"])
    assert (verified["chunks_read"] > 0, verified["items"]) == (True, [])


def test_a_listing_names_no_xet_hash(user: Shell, hub: Hub, root: Path) -> None:
    repository = hub.repo("org/model")
    repository.is_xet = True
    sha = repository.commit(FILES)

    pull(user, "hf://org/model")

    listing = json.loads((root / f"models--org--model/trees/{sha}.json").read_bytes())
    assert listing["files"].keys() == FILES.keys()
    assert not [file for file in listing["files"].values() if "xet_hash" in file]


def test_a_pulled_repository_is_found_offline_by_branch_commit_pattern_and_file(
    user: Shell, hub: Hub, root: Path
) -> None:
    repository = hub.repo("org/model")
    sha = repository.commit(FILES)
    pull(user, "hf://org/model")
    hub.log.clear()

    for revision in (None, "main", sha):
        assert offline(root, revision) == FILES
        assert offline(root, revision, allow_patterns=["*.json"]) == FILES
        for path, content in FILES.items():
            found = hf_hub_download("org/model", path, revision=revision, cache_dir=root, local_files_only=True)
            assert Path(found).read_bytes() == content
    downloaded = user.executed().run("hf", "download", "org/model", "--quiet", HF_HUB_OFFLINE="1")
    assert (downloaded.code, str(root / "models--org--model/snapshots" / sha) in downloaded.out) == (0, True)
    with pytest.raises(LocalEntryNotFoundError):
        offline(root, "v1")
    assert hub.log.count() == 0


@SELECTIONS
def test_a_selection_is_never_taken_for_the_whole(user: Shell, hub: Hub, root: Path, allow: tuple[str, ...]) -> None:
    hub.repo("org/model").commit(FILES)
    pulled = pull(user, "hf://org/model", allow=allow)
    selected = tree(Path(pulled["destination"]))
    assert 0 < len(selected) < len(FILES)

    with pytest.raises(IncompleteSnapshotError, match="nested/"):
        offline(root)
    assert offline(root, allow_patterns=list(selected)) == selected
    for path in selected:
        hf_hub_download("org/model", path, cache_dir=root, local_files_only=True)
    hub.log.clear()

    assert online(hub, root) == FILES
    assert (hub.log.count("config.json"), hub.log.count("empty.txt") > 0) == (0, True)
    assert offline(root) == FILES


@SELECTIONS
def test_several_selections_of_a_commit_add_up(user: Shell, hub: Hub, root: Path, allow: tuple[str, ...]) -> None:
    sha = hub.repo("org/model").commit(FILES)
    pull(user, "hf://org/model", allow=allow)
    pull(user, f"hf://org/model@{sha}", allow=("nested/**", ".gitattributes", "*.txt"))

    pull(user, "hf://org/model", allow=("**/*.safetensors", "config.json"))

    assert offline(root) == FILES


@SELECTIONS
def test_a_held_listing_needs_no_hub(user: Shell, hub: Hub, root: Path, tmp_path: Path, allow: tuple[str, ...]) -> None:
    sha = hub.repo("org/model").commit(FILES)
    pull(user, "hf://org/model", allow=allow)
    hub.fail(drop(), times=None)
    elsewhere = replace(user, extra={**user.extra, "HF_HUB_CACHE": str(tmp_path / "elsewhere")})

    by_name = pull(elsewhere, "hf://org/model", "--offline", allow=allow)
    by_commit = pull(user, f"hf://org/model@{sha}", allow=allow)

    assert by_name["resolved_revision"] == by_commit["resolved_revision"] == sha
    with pytest.raises(IncompleteSnapshotError):
        offline(tmp_path / "elsewhere")


def test_no_view_of_a_selection_is_made_where_the_whole_listing_is_unknown(user: Shell, hub: Hub, root: Path) -> None:
    sha = hub.repo("org/model").commit(FILES)
    assert user.run("bdn", "pull", "hf://org/model", "out", "--allow", "config.json").code == 0

    refused = user.run("bdn", "pull", "hf://org/model", "--allow", "config.json", "--offline", "--hub-cache")
    assert (refused.code, f"a listing of all files of hf://org/model@{sha}" in refused.err) == (4, True), refused.err
    assert not list(root.rglob("config.json"))

    assert pull(user, "hf://org/model", allow=("config.json",))["bytes_transferred"] == 0
    with pytest.raises(IncompleteSnapshotError):
        offline(root)


def test_a_private_repository_is_listed_whole_with_the_credentials_of_its_mirror(
    user: Shell, hub: Hub, root: Path
) -> None:
    hub.repo("org/model", private=True).commit(FILES)
    secret = {"BDN_SECRET_HUB": hub.token}

    pull(replace(user, extra={**user.extra, **secret}), "hf://org/model", "--secret", "hub", allow=("config.json",))

    with pytest.raises(IncompleteSnapshotError, match="7 file"):
        offline(root)
    assert offline(root, allow_patterns=["config.json"]) == {"config.json": FILES["config.json"]}


def blobs(root: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in (root / "models--org--model/blobs").iterdir()}


def test_commits_share_blobs_and_refs_name_what_was_asked_for(user: Shell, hub: Hub, root: Path) -> None:
    repository = hub.repo("org/model")
    old = repository.commit(FILES)
    repository.tag("v1")
    pull(user, "hf://org/model")
    before = blobs(root)
    new = repository.commit({"README.md": b"# new\n", "config.json": None})
    repository.commit({"README.md": b"# proposed\n"}, branch="refs/pr/1")

    pull(user, "hf://org/model")
    after = blobs(root)
    pull(user, "hf://org/model@v1")
    pull(user, "hf://org/model@refs/pr/1")

    changed = {path: content for path, content in FILES.items() if path != "config.json"}
    assert (len(after), before.items() <= after.items()) == (len(before) + 1, True)
    assert offline(root, "main") == offline(root, new) == {**changed, "README.md": b"# new\n"}
    assert offline(root, "v1") == offline(root, old) == FILES
    assert offline(root, "refs/pr/1") == {**changed, "README.md": b"# proposed\n"}
    assert (root / "models--org--model/refs/main").read_text() == new


@needs_mounts
def test_blobs_on_another_file_system_are_copies_that_later_pulls_keep(shell: Shell, hub: Hub, tmp_path: Path) -> None:
    repository = hub.repo("org/model")
    repository.commit(FILES)
    with mounted_tmpfs(tmp_path / "disk", "72m") as disk:
        user = replace(shell, extra={**shell.extra, "HF_HUB_CACHE": str(disk / "hub")})
        first = pull(user, "hf://org/model")
        before = blobs(disk / "hub")
        repository.commit({"README.md": b"# new\n"})

        second = pull(user, "hf://org/model")

        assert (first["view"], second["view"]) == ("copy", "copy")
        assert before.items() <= blobs(disk / "hub").items()
        assert offline(disk / "hub") == {**FILES, "README.md": b"# new\n"}


def two_repositories(hub: Hub) -> tuple[HubRepository, HubRepository]:
    model, other = hub.repo("org/model"), hub.repo("org/other")
    model.commit(FILES)
    other.commit({"config.json": FILES["config.json"], "README.md": b"# other\n"})
    return model, other


def test_what_others_have_in_the_cache_stays(user: Shell, hub: Hub, root: Path) -> None:
    """Another repository, and of this one the files, refs and locks of the client itself."""
    model, _ = two_repositories(hub)
    online(hub, root, "org/other")
    online(hub, root, allow_patterns=["*.json"])
    model.commit({"README.md": b"# new\n"})
    before = layout(root)

    pull(user, "hf://org/model@main", allow=("README.md",))

    after = layout(root)
    assert {name: after[name] for name in before} | {"models--org--model/refs/main": ""} == {
        **before, "models--org--model/refs/main": "",
    }  # fmt: skip
    assert offline(root, repo_id="org/other").keys() == {"config.json", "README.md"}
    (root / ".locks/of-mine").touch()
    assert online(hub, root) == {**FILES, "README.md": b"# new\n"}


def test_hf_cache_lists_and_verifies_what_was_pulled(user: Shell, hub: Hub, root: Path) -> None:
    two_repositories(hub)
    hub.repo("org/data", kind="dataset").commit({"a/train.parquet": b"rows"})
    for source in ("hf://org/model", "hf://org/other", "hf://datasets/org/data"):
        pull(user, source)

    listed = hf(user, "cache", "ls", "--quiet").out.split()
    verified = hf(user, "cache", "verify", "org/model", "--fail-on-missing-files", "--fail-on-extra-files")
    data = hf(user, "cache", "verify", "org/data", "--repo-type", "dataset", "--fail-on-missing-files")

    assert sorted(listed) == ["dataset/org/data", "model/org/model", "model/org/other"]
    assert (f"Verified {len(FILES)} file(s)" in verified.out, "Verified 1 file(s)" in data.out) == (True, True)


def test_hf_cache_rm_and_prune_remove_names_and_harm_nothing_behind(user: Shell, hub: Hub, root: Path) -> None:
    model, _ = two_repositories(hub)
    pull(user, "hf://org/model")
    old = model.commit({"README.md": b"# new\n"})
    pull(user, "hf://org/model")
    model.commit({"README.md": b"# newer\n"})
    pull(user, "hf://org/model")
    pull(user, "hf://org/other")

    hf(user, "cache", "rm", old, "--yes")
    hf(user, "cache", "rm", "model/org/other", "--yes")
    hf(user, "cache", "prune", "--yes")

    assert len(list((root / "models--org--model/snapshots").iterdir())) == 1
    assert not (root / "models--org--other").exists()
    assert offline(root) == {**FILES, "README.md": b"# newer\n"}
    hub.log.clear()
    assert user.told("bdn", "pull", f"hf://org/model@{old}", "out")["bytes_transferred"] == 0
    assert tree(user.root / "out") == {**FILES, "README.md": b"# new\n"}
    assert pull(user, "hf://org/other")["bytes_transferred"] == 0
    assert offline(root, repo_id="org/other")["README.md"] == b"# other\n"
    assert hub.log.bytes_served("/resolve/") + hub.log.bytes_served(origin="cdn") == 0
    assert user.told("bdn-admin", "verify", "out")["items"] == []


def test_a_second_pull_restores_what_was_removed_or_spoiled(user: Shell, hub: Hub, root: Path) -> None:
    hub.repo("org/model").commit(FILES)
    pulled = pull(user, "hf://org/model")
    snapshot = Path(pulled["destination"])
    (snapshot / "nested/empty.txt").unlink()
    (snapshot / "config.json").resolve().unlink()
    spoiled = (snapshot / "small.safetensors").resolve()
    spoiled.unlink()
    spoiled.write_bytes(b"not what it was!!")
    edited = (snapshot / "model.safetensors").resolve()  # the cache's own file
    edited.chmod(0o644)
    with edited.open("r+b") as file:
        file.write(b"edited")
    (root / "models--org--model/refs/main").unlink()
    hub.log.clear()

    again = pull(user, "hf://org/model")
    (root / "models--org--model/refs/main").unlink()
    third = pull(user, "hf://org/model")

    assert (again["bytes_transferred"], third["bytes_transferred"]) == (0, 0)
    assert offline(root) == FILES
    hf(user, "cache", "verify", "org/model", "--fail-on-missing-files")


def test_a_dry_run_says_what_would_come_and_writes_nothing(user: Shell, hub: Hub, root: Path) -> None:
    hub.repo("org/model").commit(FILES)

    planned = pull(user, "hf://org/model", "--dry-run")
    assert (planned["is_there"], root.exists()) == (False, False)
    pull(user, "hf://org/model")
    again = pull(user, "hf://org/model", "--dry-run")

    assert (again["is_there"], again["removed"], again["bytes_to_transfer"]) == (True, [], 0)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"HF_HUB_CACHE": "{root}/mine", "HF_HOME": "{root}/unused"}, "mine"),
        ({"HF_HOME": "{root}/of-hf"}, "of-hf/hub"),
        ({"XDG_CACHE_HOME": "{root}/caches"}, "caches/huggingface/hub"),
        ({}, "home/.cache/huggingface/hub"),
    ],
    ids=["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "none"],
)
def test_the_default_directory_is_where_the_client_looks(
    shell: Shell, hub: Hub, variables: dict[str, str], place: str
) -> None:
    hub.repo("org/model").commit({"config.json": b"{}"})
    given = {name: value.format(root=shell.root) for name, value in variables.items()}
    user = replace(shell, extra={**shell.extra, **given})

    pull(user, "hf://org/model")

    assert offline(shell.root / place) == {"config.json": b"{}"}
    assert "model/org/model" in hf(user, "cache", "ls", "--quiet").out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("hf://org/model", "out", "--hub-cache", "hub"), "either DEST or --hub-cache"),
        (("hf://org/model",), "either DEST or --hub-cache"),
        (("hf://org/model", "--replace", "--hub-cache"), "--replace and --link are for DEST"),
        (("s3://bucket/model", "--hub-cache"), "is not a repository of a hub"),
        (("hf://org/model@a/../../b", "--hub-cache"), "'..'"),
        (("hf://org/model", "--hub-cache", "file"), "a part of the path is a file"),
    ],
)
def test_what_cannot_be_is_refused_before_the_hub_is_asked(
    user: Shell, hub: Hub, arguments: tuple[str, ...], reason: str
) -> None:
    (user.root / "file").touch()

    refused = user.run("bdn", "pull", *arguments)

    assert (refused.code, reason in refused.err) == (2, True), refused.err
    assert hub.log.count() == 0
