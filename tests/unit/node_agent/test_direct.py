"""Content goes past the page cache where the file system allows it, is the same where it does not, and the reason is told."""

import errno
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from bdn.disk.direct import BLOCK, LEAST_BYTES, DirectFile, DirectWrites
from tests.support.agent.mounts import mounted, mounted_tmpfs, mounted_xfs, needs_mounts, needs_xfs
from tests.support.content.noise import noise
from tests.support.crash.scripted_writes import Step, Writes, aligned, failing, open_descriptors, taking

CONTENT = noise(LEAST_BYTES + 3 * BLOCK + 1000)
BODY = LEAST_BYTES + 3 * BLOCK


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes.noted(monkeypatch)


@contextmanager
def opened(path: Path, direct: DirectWrites) -> Iterator[DirectFile]:
    file = DirectFile(path, direct)
    try:
        file.open()
        yield file
    finally:
        file.close()


def written(folder: Path, content: memoryview, direct: DirectWrites, offset: int = 0) -> bytes:
    """What is in the file at ``offset`` after writing."""
    with opened(folder / "file", direct) as file:
        file.write(content, offset)
    return (folder / "file").read_bytes()[offset:]


def refusing(number: int, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """From now on opening a file for direct writes fails; which files they were."""
    real, asked = os.open, list[Path]()

    def refuse(path: Path, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            asked.append(path)
            raise OSError(number, os.strerror(number))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    return asked


def test_whole_blocks_are_written_directly_and_the_tail_through_the_page_cache(tmp_path: Path, writes: Writes) -> None:
    direct = DirectWrites()
    assert written(tmp_path, aligned(CONTENT), direct, 8 * BLOCK) == CONTENT
    assert writes.seen == [(BODY, 8 * BLOCK, True), (1000, 8 * BLOCK + BODY, False)]
    assert (direct.are_direct, direct.reason) == (True, None)


@pytest.mark.parametrize(("size", "offset"), [(LEAST_BYTES - 1, 0), (100, 0), (len(CONTENT), 1), (len(CONTENT), 512)])
def test_little_and_odd_places_go_through_the_page_cache_and_are_no_reason_to_give_up(
    tmp_path: Path, writes: Writes, size: int, offset: int
) -> None:
    direct = DirectWrites()
    assert written(tmp_path, aligned(CONTENT[:size]), direct, offset) == CONTENT[:size]
    assert writes.seen == [(size, offset, False)]
    assert direct.are_direct


def test_memory_that_does_not_begin_on_a_page_is_written_all_the_same(tmp_path: Path) -> None:
    direct = DirectWrites()
    assert written(tmp_path, aligned(b"xyz" + CONTENT)[3:], direct) == CONTENT


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_to_open_is_asked_once_and_the_reason_is_kept_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    asked = refusing(number, monkeypatch)
    direct = DirectWrites()
    for _ in range(3):
        assert written(tmp_path, aligned(CONTENT), direct) == CONTENT
    assert asked == [tmp_path / "file"]
    assert not direct.are_direct
    assert direct.reason == f"{tmp_path}: the file system refuses direct writes ({os.strerror(number)})"
    assert [(record.levelno, str(direct.reason) in record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, True)
    ]


def test_a_file_system_that_refuses_at_the_first_write_gets_the_same_bytes_and_the_reason_is_kept(
    tmp_path: Path, writes: Writes
) -> None:
    direct = DirectWrites()
    writes.steps = [failing(errno.EINVAL)]
    for _ in range(2):
        assert written(tmp_path, aligned(CONTENT), direct) == CONTENT
    assert [is_direct for _, _, is_direct in writes.seen] == [True, False, False]
    assert "Invalid argument" in str(direct.reason)


@pytest.mark.parametrize(
    "steps",
    [[taking(BLOCK)] * 3, [taking(BLOCK + 100)], [taking(BLOCK), taking(7)], [taking(BLOCK), failing(errno.EINVAL)]],
    ids=["block by block", "half a block", "seven bytes", "refused half-way"],
)
def test_what_the_kernel_leaves_over_is_written_too(tmp_path: Path, writes: Writes, steps: list[Step]) -> None:
    writes.steps = list(steps)
    assert written(tmp_path, aligned(CONTENT), DirectWrites()) == CONTENT
    assert not writes.steps


def test_a_kernel_that_takes_nothing_is_not_asked_for_ever(tmp_path: Path, writes: Writes) -> None:
    writes.steps = [taking(0)] * 10
    assert written(tmp_path, aligned(CONTENT), DirectWrites()) == CONTENT
    assert writes.seen == [(BODY, 0, True), (len(CONTENT), 0, False)]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fails_is_not_a_disk_that_cannot_write_directly(
    tmp_path: Path, writes: Writes, number: int
) -> None:
    direct = DirectWrites()
    writes.steps = [failing(number)]
    with pytest.raises(OSError, match=os.strerror(number)):
        written(tmp_path, aligned(CONTENT), direct)
    assert direct.are_direct
    assert written(tmp_path, aligned(CONTENT), direct) == CONTENT


def test_no_descriptor_stays_open_whatever_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()
    written(tmp_path, aligned(CONTENT), DirectWrites())
    with pytest.raises(FileNotFoundError):
        written(tmp_path / "absent", aligned(CONTENT), DirectWrites())
    refusing(errno.EMFILE, monkeypatch)
    with pytest.raises(OSError, match="Too many open files"):
        written(tmp_path, aligned(CONTENT), DirectWrites())
    assert open_descriptors() == before


def test_the_probe_says_what_the_first_fill_will_find_and_leaves_nothing_behind(tmp_path: Path, writes: Writes) -> None:
    fine, refused = DirectWrites(), DirectWrites()
    fine.probe(tmp_path)
    assert writes.seen == [(BLOCK, 0, True)]
    writes.steps = [failing(errno.EINVAL)]
    refused.probe(tmp_path)
    assert (fine.are_direct, refused.are_direct) == (True, False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_probe_on_a_full_or_broken_disk_decides_nothing(tmp_path: Path, writes: Writes, number: int) -> None:
    direct = DirectWrites()
    writes.steps = [failing(number)]
    direct.probe(tmp_path)
    direct.probe(tmp_path / "absent")
    assert direct.are_direct
    assert list(tmp_path.iterdir()) == []


@contextmanager
def mounted_overlay(place: Path) -> Iterator[Path]:
    """As in a container, with its layers on the file system of the test."""
    for name in ("lower", "upper", "work", "merged"):
        (place / name).mkdir(parents=True)
    layers = f"lowerdir={place}/lower,upperdir={place}/upper,workdir={place}/work"
    with ExitStack() as stack:
        try:
            stack.enter_context(mounted(place / "merged", "-t", "overlay", "-o", layers, "overlay"))
        except subprocess.CalledProcessError:
            pytest.skip("this kernel or this folder's file system takes no overlay")
        yield place / "merged"


@pytest.mark.parametrize(
    ("mounting", "is_direct"),
    [
        # The one file system of every kernel that knows no direct I/O.
        pytest.param(lambda place: mounted(place, "-t", "ramfs", "ramfs"), False, id="ramfs", marks=needs_mounts),
        pytest.param(lambda place: mounted_tmpfs(place, "8m"), None, id="tmpfs", marks=needs_mounts),  # newer ones do
        pytest.param(mounted_overlay, None, id="overlay", marks=needs_mounts),
        pytest.param(lambda place: mounted_xfs(place, place.with_name("image")), True, id="xfs", marks=needs_xfs),
    ],
)
def test_every_file_system_gets_the_same_bytes_and_one_without_direct_writes_says_so(
    tmp_path: Path, mounting: Callable[[Path], AbstractContextManager[Path]], is_direct: bool | None
) -> None:
    direct = DirectWrites()
    with mounting(tmp_path / "place") as place:
        direct.probe(place)
        assert written(place, aligned(CONTENT), direct) == CONTENT
    assert is_direct in (None, direct.are_direct)
    assert direct.are_direct == (direct.reason is None)
    if is_direct is False:
        assert direct.reason == f"{place}: the file system refuses direct writes (Invalid argument)"
