"""A directory of a job, looked at and read while somebody hostile changes it: nothing outside is read, and nothing that changed is believed."""

import errno
import os
import random
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

from bdn.core.chunk import CHUNK_SIZE, chunk_range, digest_of
from bdn.core.errors import DiskFailedError, LimitExceededError
from bdn.core.training.settling import Settling, Stamp
from bdn.disk.durable import opened
from bdn.disk.syscalls import birth_time, exchange
from bdn.wire.push_schema import CheckpointDetails
from node_agent.job.syncing import Found, checkpoints_in
from node_agent.job.tree import ChangedError, JobDirectory, JobTree, open_for_writing
from tests.support.crash.scripted_writes import failing

INSIDE, OUTSIDE = b"inside", b"secret"  # of one size, so that a size alone gives nothing away
SWAPS = 400


@pytest.fixture(name="root")
def a_directory(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoints"
    root.mkdir()
    return root


def put(root: Path, path: str, content: bytes = INSIDE) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def looked(root: Path, limit: int = 1000) -> JobTree:
    return JobDirectory(root, limit).look()


def test_a_look_finds_every_regular_file_with_its_stamp(root: Path) -> None:
    for path in (
        "loose",
        "checkpoint-1/.metadata",
        "checkpoint-1/__0_0.distcp",
        "checkpoint-1/a/b/c",
        "checkpoint-2/ü",
    ):
        put(root, path)

    tree = looked(root)

    assert sorted(tree.files) == [
        "checkpoint-1/.metadata",
        "checkpoint-1/__0_0.distcp",
        "checkpoint-1/a/b/c",
        "checkpoint-2/ü",
        "loose",
    ]
    assert tree.skipped == {}
    found = (root / "loose").stat()
    assert tree.files["loose"] == (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)
    assert {name: folder.inode for name, folder in tree.folders.items()} == {
        name: (root / name).stat().st_ino for name in ("checkpoint-1", "checkpoint-2")
    }


def test_a_link_is_named_with_the_checkpoint_that_it_lies_in(root: Path) -> None:
    put(root, "ünï/model")
    put(root, "other/model")
    (root / "ünï/link").symlink_to("/etc/passwd")

    found = checkpoints_in(looked(root))

    assert {name: list(one.skipped) for name, one in found.items()} == {
        "ünï": ["'\\xfcn\\xef/link': is a link that leads out of the directory"],
        "other": [],
    }


@pytest.mark.parametrize(
    ("nanoseconds", "year"), [(1_700_000_000 * 10**9, 2023), (-(10**19), 1970), (10**30, 9999), (0, 1970)]
)
def test_a_checkpoint_has_a_date_however_its_files_are_dated(nanoseconds: int, year: int) -> None:
    assert Found("a", {"model": Stamp(1, nanoseconds, 0, 1, 1)}, ()).newest.year == year


def test_look__link_to_a_file_of_the_directory__is_that_file(root: Path) -> None:
    put(root, "a/epoch=3.ckpt")
    put(root, "b/model")
    links = {"a/last.ckpt": "epoch=3.ckpt", "a/last2": "./last.ckpt", "a/other": "../b/model", "loose": "a/last2"}
    for path, text in links.items():
        (root / path).symlink_to(text)

    tree = looked(root)

    assert tree.skipped == {}
    assert tree.targets == {
        "a/last.ckpt": "a/epoch=3.ckpt",
        "a/last2": "a/epoch=3.ckpt",
        "a/other": "b/model",
        "loose": "a/epoch=3.ckpt",
    }
    assert all(tree.files[path] == tree.files[target] for path, target in tree.targets.items())
    assert checkpoints_in(tree)["a"].place("last.ckpt") == "a/epoch=3.ckpt"


@pytest.mark.parametrize(
    "text",
    [
        "/etc/passwd",
        "../../etc/passwd",
        "../a/../../x",
        "../a",
        "..",
        "link",
        "gone",
        "../folder/model",
        "../folder/../a/model",
    ],
)
def test_look__link_elsewhere__is_skipped_and_named(root: Path, text: str) -> None:
    put(root, "a/model")
    (root / "folder").symlink_to("a")
    (root / "a/link").symlink_to(text)

    tree = looked(root)

    assert list(tree.files) == ["a/model"]
    assert tree.targets == {}
    assert sorted(tree.skipped) == ["a/link", "folder"]


def test_temporary_folders_are_known_and_not_looked_into(root: Path) -> None:
    for name in ("tmp-1", "a.tmp", ".hidden"):
        put(root, f"{name}/model")
        (root / name / "link").symlink_to("/")

    tree = looked(root, limit=3)

    assert (tree.files, tree.skipped, sorted(tree.folders)) == ({}, {}, [".hidden", "a.tmp", "tmp-1"])


def test_what_is_no_file_and_what_no_manifest_can_name_is_skipped_and_named(root: Path) -> None:
    put(root, "a/model")
    (root / "a/folder").symlink_to("/etc")
    (root / "a/dangling").symlink_to("nothing")
    os.mkfifo(root / "a/fifo")
    with socket.socket(socket.AF_UNIX) as bound, in_folder(root / "a"):
        bound.bind("socket")
    put(root, "a/back\\slash")
    Path(os.fsdecode(os.fsencode(root) + b"/a/\xff")).write_bytes(INSIDE)

    tree = looked(root)

    assert list(tree.files) == ["a/model"]
    assert tree.skipped == {
        "a/folder": "is a link that leads out of the directory",
        "a/dangling": "is a link to 'nothing', which is not a file in the directory",
        "a/fifo": "is not a file",
        "a/socket": "is not a file",
        "a/back\\slash": "has a name that a manifest cannot contain",
        "a/\udcff": "has a name that a manifest cannot contain",
    }


@contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """Relative names, because the path of a socket may have 107 bytes."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def test_a_folder_that_may_not_be_read_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read them all, so the kernel's answer is scripted."""
    put(root, "a/closed/model")
    put(root, "a/model")
    real = os.open

    def refusing(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "closed":
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refusing)

    tree = looked(root)

    assert (list(tree.files), tree.skipped) == (["a/model"], {"a/closed": "cannot be read: Permission denied"})
    assert {name: found.is_unreadable for name, found in checkpoints_in(tree).items()} == {"a": True}


def test_more_names_than_the_limit_are_refused_and_a_folder_is_a_name(root: Path) -> None:
    for number in range(3):
        put(root, f"a/{number}")

    assert len(looked(root, limit=4).files) == 3
    with pytest.raises(LimitExceededError):
        looked(root, limit=3)


def test_a_tree_of_any_depth_is_bounded(root: Path) -> None:
    folder = root
    for _ in range(200):
        folder /= "d"
        folder.mkdir()
    put(folder, "model")

    tree = looked(root)

    assert tree.files == {}
    assert list(tree.skipped.values()) == ["is nested too deep"]


def test_opening__deeply_nested_file__needs_few_descriptors(root: Path) -> None:
    path = "/".join(["d"] * 100) + "/file"
    put(root, path)
    stamp = looked(root).files[path]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest_free := os.open(root, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 8, hard))
    try:
        with JobDirectory(root, 1000).opened(path, stamp) as file:
            assert file.digest_of(chunk_range(stamp.size, 0), memoryview(bytearray(8))) == digest_of(INSIDE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Walks:
    """A bound of walks that looks whether folders are open outside of one."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.held: list[int] = []

    def _open_folders(self) -> int:
        found = 0
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                found += self._root in (place := link.readlink(), *place.parents)
        return found

    def __enter__(self) -> None:
        self.held.append(self._open_folders())

    def __exit__(self, *_: object) -> None:
        self.held.append(self._open_folders())


def test_walk__directories_share_a_bound__folders_are_open_only_within_it(root: Path) -> None:
    put(root, "checkpoint-1/a/b/c")
    walks = Walks(root)
    directory = JobDirectory(root, 1000, walks)
    tree = directory.look()
    assert walks.held == [0, 0]
    assert directory.make_durable(tree.files)
    assert walks.held == [0, 0, 0, 0]


def test_a_directory_that_is_gone_is_an_error_of_the_disk_and_its_files_are_others(root: Path) -> None:
    put(root, "a")
    stamp = looked(root).files["a"]
    root.rename(root.with_name("elsewhere"))

    with pytest.raises(DiskFailedError):
        looked(root)
    assert not is_read(root, "a", stamp, bytearray(6))


# Reading.


def is_read(root: Path, path: str, stamp: Stamp, buffer: bytearray) -> bool:
    """Whether its beginning is in the buffer, rather than that it is another file by now."""
    try:
        with JobDirectory(root, 9).opened(path, stamp) as file:
            file.read(0, memoryview(buffer))
    except ChangedError:
        return False
    return True


def test_a_chunk_is_named_however_it_is_read(root: Path) -> None:
    content = random.Random(1).randbytes(CHUNK_SIZE + 5)
    put(root, "a/b/model", content)
    stamp = looked(root).files["a/b/model"]

    with JobDirectory(root, 9).opened("a/b/model", stamp) as file:
        for part in (chunk_range(stamp.size, 0), chunk_range(stamp.size, 1)):
            for size in (CHUNK_SIZE, 1_000_000):
                expected = digest_of(content[part.start : part.stop])
                assert file.digest_of(part, memoryview(bytearray(size))) == expected


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_of_a_file_that_is_sent_one_descriptor_is_open_however_deep_it_lies(root: Path) -> None:
    """A job may nest a hundred folders, and many files are sent at once."""
    path = "/".join(["a"] * 100)
    put(root, path)
    stamp, before = looked(root).files[path], open_files()

    with JobDirectory(root, 9).opened(path, stamp):
        assert open_files() == before + 1
    assert open_files() == before


def replaced(file: Path) -> None:
    put(file.parent, "new")
    (file.parent / "new").rename(file)


def linked(file: Path) -> None:
    aside = file.rename(file.with_name("aside"))
    file.symlink_to(aside)


def folder_linked(file: Path) -> None:
    aside = file.parent.rename(file.parent.with_name("aside"))
    file.parent.symlink_to(aside, target_is_directory=True)


def made_a_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def written_in_place_and_dated_back(file: Path) -> None:
    found = file.stat()
    file.write_bytes(OUTSIDE)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


CHANGES: list[Callable[[Path], object]] = [
    replaced,
    linked,
    folder_linked,
    made_a_fifo,
    written_in_place_and_dated_back,
    Path.unlink,
    lambda file: os.truncate(file, 3),
    lambda file: put(file.parent, file.name, INSIDE + b"more"),
]


@pytest.mark.parametrize("change", CHANGES, ids=range(len(CHANGES)))
def test_a_file_that_is_not_what_was_seen_is_told_as_a_value(root: Path, change: Callable[[Path], object]) -> None:
    file = put(root, "a/model")
    stamp = looked(root).files["a/model"]
    _tick(file)
    change(file)

    assert not is_read(root, "a/model", stamp, bytearray(6))
    assert JobDirectory(root, 9).read_small("a/model", stamp, 100) is None


def _tick(file: Path) -> None:
    """Until the kernel's clock has gone on since the file was written."""
    probe = file.with_name("probe")
    while True:
        probe.write_bytes(b"")
        now = probe.stat().st_ctime_ns
        probe.unlink()
        if now > file.stat().st_ctime_ns:
            return


def test_a_write_while_a_chunk_is_read_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what was seen before, but by the look at the end."""
    file = put(root, "model")
    stamp, real = looked(root).files["model"], os.preadv
    _tick(file)

    def writing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = real(descriptor, buffers, offset)
        file.write_bytes(OUTSIDE)
        return count

    monkeypatch.setattr(os, "preadv", writing)

    assert not is_read(root, "model", stamp, bytearray(6))


def test_a_small_file_is_read_whole_and_one_that_is_large_or_empty_says_nothing(root: Path) -> None:
    put(root, "small")
    put(root, "empty", b"")
    directory, files = JobDirectory(root, 9), looked(root).files

    assert directory.read_small("small", files["small"], 6) == INSIDE
    assert directory.read_small("small", files["small"], 5) == b""
    assert directory.read_small("empty", files["empty"], 5) == b""


# Somebody hostile.


@contextmanager
def swapped(first: Path, second: Path) -> Iterator[threading.Event]:
    """Two names change places all the time, until the block ends. The event is set once enough swaps were made."""
    is_over, is_enough = threading.Event(), threading.Event()

    def swap() -> None:
        count = 0
        while not (is_over.is_set() and is_enough.is_set()):
            exchange(first, second)
            count += 1
            if count >= SWAPS:
                is_enough.set()

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield is_enough
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("what", ["folder", "file"])
def test_nothing_outside_is_ever_read_while_links_take_the_place_of_folders_and_files(
    root: Path, tmp_path: Path, what: str
) -> None:
    put(tmp_path / "outside", "model", OUTSIDE)
    file = put(root, "a/b/model")
    if what == "folder":
        victim, link, target = file.parent, root / "a/link", tmp_path / "outside"
    else:
        victim, link, target = file, file.with_name("link"), tmp_path / "outside/model"
    link.symlink_to(target)
    directory = JobDirectory(root, 100)
    outside = (tmp_path / "outside/model").stat().st_ino
    stamp = directory.look().files["a/b/model"]
    right = wrong = rounds = 0
    with swapped(victim, link) as is_enough:
        while not is_enough.is_set() or rounds < SWAPS:
            rounds += 1
            for seen in directory.look().files.values():
                assert seen.inode != outside
            buffer = bytearray(6)
            if is_read(root, "a/b/model", stamp, buffer):
                right += 1
                assert buffer == INSIDE
            else:
                wrong += 1
                assert buffer != OUTSIDE

    assert right + wrong == rounds
    assert wrong  # else nothing was swapped in time, and this test showed nothing


def test_files_that_come_and_go_during_a_look_are_no_errors(root: Path) -> None:
    put(root, "stays/model")
    is_over, is_enough = threading.Event(), threading.Event()

    def churn() -> None:
        chance, count = random.Random(2), 0
        while not (is_over.is_set() and is_enough.is_set()):
            put(root, f"{chance.randrange(5)}/{chance.randrange(5)}/model")
            with suppress(OSError):
                remove(root / str(chance.randrange(5)))
            count += 1
            if count >= SWAPS:
                is_enough.set()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        while not is_enough.is_set():
            tree = looked(root, limit=10_000)
            assert "stays/model" in tree.files
            assert tree.skipped == {}
    finally:
        is_over.set()
        thread.join()


def remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


# Renames on a real file system.


def births_are_known(root: Path) -> bool:
    with opened(root, os.O_RDONLY) as descriptor:
        return birth_time(descriptor) is not None


def test_a_rename_is_told_and_a_folder_that_got_a_free_inode_is_not(root: Path) -> None:
    if not births_are_known(root):
        pytest.skip("this file system keeps no time of birth")
    settling, directory = Settling(30), JobDirectory(root, 100)

    def is_settled(now: float) -> bool:
        tree = directory.look()
        files = {path.partition("/")[2]: stamp for path, stamp in tree.files.items()}
        settling.look(now, {"checkpoint-1": files} if files else {}, tree.folders)
        return settling.is_settled("checkpoint-1", now)

    put(root, "tmp-checkpoint-1/model")
    assert not is_settled(0)
    (root / "tmp-checkpoint-1").rename(root / "checkpoint-1")
    assert is_settled(2)
    remove(root / "checkpoint-1")

    put(root, "tmp-checkpoint-1/model")
    is_settled(4)
    _tick(root / "tmp-checkpoint-1/model")
    remove(root / "tmp-checkpoint-1")
    put(root, "checkpoint-1/model")  # on ext4 with the same inodes

    assert not is_settled(6)


# Who writes.


def test_a_file_that_a_process_has_open_for_writing_is_found(root: Path) -> None:
    files = {name: put(root, name) for name in ("read", "written", "both", "closed")}
    keys = {(file.stat().st_dev, file.stat().st_ino): name for name, file in files.items()}
    with (
        writer("open(sys.argv[1]); open(sys.argv[2], 'ab'); open(sys.argv[3], 'r+b')", files) as process,
        files["read"].open("rb"),
    ):
        found = open_for_writing(set(keys))
        assert {keys[key] for key in found} == {"written", "both"}
        process.kill()

    assert open_for_writing(set(keys)) == set()


@contextmanager
def writer(opens: str, files: dict[str, Path]) -> Iterator[subprocess.Popen[bytes]]:
    script = f"import sys; files = [{opens.replace(';', ',')}]; print('open', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, *(str(files[name]) for name in ("read", "written", "both"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        output: IO[bytes] | None = process.stdout
        assert output is not None
        assert output.readline() == b"open\n"
        yield process


def test_what_is_skipped_is_named_in_no_more_signs_than_a_mirror_takes() -> None:
    deep = "a/" + "/".join(["\u65e5" * 80] * 12)
    tree = JobTree(files={"a/model": Stamp(1, 0, 0, 1, 1)}, skipped={deep: "is a link"})
    (named,) = checkpoints_in(tree)["a"].skipped
    assert CheckpointDetails(skipped=[named]).skipped == [named]
    assert named.endswith(": is a link")


def test_open_for_writing__proc_is_hidden__nothing_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "iterdir", failing(errno.ENOENT))

    assert open_for_writing({(1, 1)}) == set()
