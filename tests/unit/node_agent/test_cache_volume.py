"""The directories of training caches: named by ids, kept as jobs left them, and with no way out of them."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from bdn.core.errors import DiskFailedError, GrantInvalidError, InvalidRequestError, NotFoundError
from bdn.wire.grants import CacheGrant
from bdn.wire.job_schema import CacheFolders
from node_agent.disk.trash import Trash
from node_agent.job.cache_volume import CacheVolume

PROJECT, TEAM = "p" * 10, "t" * 10
OTHERS = {"organisation": "other", "project": "q" * 10, "team": "u" * 10}


@pytest.fixture(name="volume")
def a_volume(tmp_path: Path) -> CacheVolume:
    return CacheVolume(tmp_path / "volumes", Trash(tmp_path / "volumes/.trash"))


class Opened(NamedTuple):
    project: Path
    team: Path
    folders: CacheFolders


def opened(volume: CacheVolume, **changes: str) -> Opened:
    volume.id()
    given = {"organisation": "org", "project": PROJECT, "team": TEAM, "cluster": "c", "volume": "v"} | changes
    folders = volume.open(CacheGrant(**given, expires_at=0.0), huggingface=True)
    return Opened(Path(folders.project), Path(folders.team), folders)


def modes(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.stat().st_mode & 0o777 for path in root.rglob("*")}


def test_nothing_is_made_before_the_first_use(volume: CacheVolume) -> None:
    assert volume.known_id() is None
    assert not volume.root.exists()


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_directories_are_named_by_ids_open_for_jobs_and_listed_by_nobody(volume: CacheVolume, umask: int) -> None:
    before = os.umask(umask)
    try:
        paths = opened(volume, organisation="../../évil\n\0 org")
    finally:
        os.umask(before)

    (home,) = [path for path in volume.root.iterdir() if path.is_dir()]
    assert len(home.name) == 32
    assert home.name.isalnum()
    assert volume.root.stat().st_mode & 0o777 == home.stat().st_mode & 0o777 == 0o711
    assert modes(home) == {
        "projects": 0o711,
        f"projects/{PROJECT}": 0o711,
        f"projects/{PROJECT}/user_artifacts": 0o777,
        f"projects/{PROJECT}/huggingface": 0o777,
        "teams": 0o711,
        f"teams/{TEAM}": 0o777,
    }
    project = home / "projects" / PROJECT
    assert paths.folders == CacheFolders(
        project_id=PROJECT,
        project=str(project / "user_artifacts"),
        team=str(home / "teams" / TEAM),
        huggingface=str(project / "huggingface"),
    )


RACE = """
import sys
from pathlib import Path
from node_agent.disk.trash import Trash
from node_agent.job.cache_volume import CacheVolume
root = Path(sys.argv[1])
sys.stdin.read(1)
print(CacheVolume(root, Trash(root / ".trash")).id())
"""


def test_nodes_that_use_a_volume_first_at_the_same_time_read_one_id(volume: CacheVolume) -> None:
    command = [sys.executable, "-c", RACE, str(volume.root)]
    nodes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
        for _ in range(4)
    ]
    for node in nodes:
        assert node.stdin is not None
        node.stdin.write(b"x")
        node.stdin.flush()
    told = {node.communicate()[0].decode().strip() for node in nodes}

    assert told == {volume.id()} == {volume.known_id()}


def test_what_is_no_id_is_told(volume: CacheVolume) -> None:
    volume.root.mkdir()
    (volume.root / "volume_id").write_text("not one")
    assert volume.known_id() is None
    with pytest.raises(DiskFailedError, match="volume_id"):
        volume.id()


def state(root: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in root.rglob("*"):
        one = path.lstat()
        target = path.readlink() if stat.S_ISLNK(one.st_mode) else None
        found[str(path.relative_to(root))] = (one.st_mode, one.st_uid, one.st_gid, one.st_mtime_ns, one.st_ino, target)
    return found


def test_the_next_job_finds_ten_thousand_files_as_the_one_before_left_them(volume: CacheVolume) -> None:
    first = opened(volume).project
    for number in range(10_000):
        path = first / f"{number % 50}/{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * (number % 7))
        path.chmod(0o400 | number % 0o400)
    (first / "link").symlink_to("/etc/passwd")
    (first / "hard").hardlink_to(first / "0/0")
    if os.geteuid() == 0:
        for number in range(0, 10_000, 100):
            os.chown(first / f"{number % 50}/{number}", 4711, 4712)
    first.chmod(0o750)
    before = state(first)

    second = opened(volume).project

    assert second == first
    assert state(second) == before
    assert len(before) == 10_052
    assert second.stat().st_mode & 0o777 == 0o750


def test_others_have_other_directories(volume: CacheVolume) -> None:
    one = opened(volume)
    of_others = {name: opened(volume, **{name: given}) for name, given in OTHERS.items()}
    for name, other in of_others.items():
        assert (one.project == other.project) == (name == "team")
        assert (one.team == other.team) == (name == "project")
    places = [one.project, one.team, *(other.team for other in of_others.values())]
    assert not any(first in second.parents for first in places for second in places)


@pytest.mark.parametrize("name", ["../xxxxxxx", "X" * 10, "p" * 9, "p" * 11, "", "p" * 10 + "\n"])
def test_what_is_no_id_names_no_directory(volume: CacheVolume, name: str) -> None:
    for kind in ("project", "team"):
        with pytest.raises(ValueError, match="is not an id"):
            opened(volume, **{kind: name})


def test_a_link_in_the_place_of_a_folder_is_refused(volume: CacheVolume, tmp_path: Path) -> None:
    home = opened(volume).team.parents[1]
    (tmp_path / "outside").mkdir()
    (home / "projects" / ("q" * 10)).symlink_to(tmp_path / "outside")
    with pytest.raises(DiskFailedError):
        opened(volume, project="q" * 10)
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_path_is_removed_and_nothing_that_a_link_leads_to(volume: CacheVolume, tmp_path: Path) -> None:
    paths, outside = opened(volume), tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"")
    (paths.project / "data/old").mkdir(parents=True)
    (paths.project / "data/old/x").write_bytes(b"")
    (paths.project / "out").symlink_to(outside)
    (paths.project / "team").symlink_to(paths.team)
    (paths.team / "kept").write_bytes(b"")

    volume.remove(PROJECT, "user_artifacts/data/old")
    assert list((paths.project / "data").iterdir()) == []
    for path in ("user_artifacts/out/kept", "user_artifacts/team/kept", "user_artifacts/absent", "other/x"):
        with pytest.raises(NotFoundError):
            volume.remove(PROJECT, path)
    for path in ("", ".", "..", "../x", "/etc/passwd", "user_artifacts/../../../x", "a//b"):
        with pytest.raises((InvalidRequestError, NotFoundError)):
            volume.remove(PROJECT, path)
    with pytest.raises(NotFoundError):
        volume.remove("q" * 10, "user_artifacts/data")
    volume.remove(PROJECT, "user_artifacts/out")  # the link itself

    assert (outside / "kept").exists()
    assert (paths.team / "kept").exists()
    assert sorted(path.name for path in paths.project.iterdir()) == ["data", "team"]


def test_a_project_goes_whole_and_its_team_stays(volume: CacheVolume) -> None:
    paths = opened(volume)
    (paths.project / "x").write_bytes(b"")
    other = opened(volume, organisation="other")

    assert volume.remove_project("org", PROJECT)
    assert not volume.remove_project("org", PROJECT)

    assert not paths.project.parent.exists()
    assert paths.team.exists()
    assert other.project.exists()
    with pytest.raises(NotFoundError):
        volume.project("q" * 10)


def test_a_deleted_project_is_not_opened_again_and_its_team_is(volume: CacheVolume) -> None:
    paths, other = opened(volume), opened(volume, project="q" * 10)
    for organisation in ("org", "org", "org without caches"):  # two nodes may be told the same
        volume.close_project(organisation, PROJECT)
    assert volume.remove_project("org", PROJECT)
    for _ in range(2):
        with pytest.raises(GrantInvalidError, match=f"project {PROJECT} was deleted"):
            opened(volume)
    projects = paths.project.parents[1]
    assert sorted(path.name for path in projects.iterdir()) == [f"{PROJECT}.gone", "q" * 10]
    assert (projects / f"{PROJECT}.gone").stat().st_size == 0
    assert opened(volume, project="q" * 10) == other
    assert other.team == paths.team
    assert opened(volume, organisation="other").project.exists()
