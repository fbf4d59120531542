"""Each way of exposing keeps the contract, and what is special about it."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from bdn.core.errors import MountFailedError
from bdn.disk import binding, syscalls
from bdn.disk.binding import mounts_below
from bdn.wire.stage_schema import ExposureKind
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles
from node_agent.stage.view import exposure as module
from node_agent.stage.view.exposure import choose, conceal, expose
from node_agent.stage.view.views import Views
from tests.support.agent.mounts import mounted, needs_mounts
from tests.support.content.trees import tree

FILES = {"config.json": b"{}", "a b/\u00fc.txt": b"unicode"}
BIND = pytest.param("bind", marks=needs_mounts)
every_kind = pytest.mark.parametrize("kind", ["none", "symlink", BIND])


@pytest.fixture
def places(tmp_path: Path) -> Places:
    places = Places(tmp_path / "with space\\and backslash")
    places.make()
    return places


@pytest.fixture
def place(places: Places) -> Path:
    return places.mounts / "stg_1/app/model"


@pytest.fixture
def kind() -> ExposureKind:
    """Of tests that are about one kind alone, and name it."""
    return "bind"


@pytest.fixture
def view(places: Places, place: Path, kind: ExposureKind) -> Path:
    """Where views of this kind stand."""
    view = place if kind == "none" else places.views / "stg_1/app/model"
    for path, content in FILES.items():
        (view / path).parent.mkdir(parents=True, exist_ok=True)
        (view / path).write_bytes(content)
    return view


@contextmanager
def bound(places: Places, place: Path, view: Path) -> Iterator[None]:
    """Where a test fails nothing stays mounted either."""
    expose("bind", view, place)
    try:
        yield
    finally:
        conceal(place, places.mounts)


@every_kind
def test_the_place_shows_the_view_however_often_it_is_exposed(
    places: Places, place: Path, view: Path, kind: ExposureKind
) -> None:
    for _ in range(2):
        expose(kind, view, place)
        assert tree(place) == FILES
    assert conceal(place, places.mounts) is None
    assert tree(view) == FILES


@every_kind
def test_concealing_can_be_repeated_and_needs_no_exposing(
    places: Places, place: Path, view: Path, kind: ExposureKind
) -> None:
    assert conceal(place, places.mounts) is None
    expose(kind, view, place)
    for _ in range(2):
        assert conceal(place, places.mounts) is None
    if view != place:
        assert list(places.mounts.iterdir()) == []  # mount points and the folders above them are gone


@pytest.mark.parametrize("kind", ["none", BIND])  # a link does not notice
def test_a_view_that_is_not_there_cannot_be_exposed(place: Path, view: Path, kind: ExposureKind) -> None:
    with pytest.raises(MountFailedError) as caught:
        expose(kind, view.with_name("absent"), place.with_name("absent"))

    assert caught.value.path == str(place.with_name("absent"))


def test_a_link_to_something_else_is_replaced(place: Path, view: Path) -> None:
    place.parent.mkdir(parents=True)
    place.symlink_to("/elsewhere")

    expose("symlink", view, place)

    assert tree(place) == FILES


def test_a_place_that_is_taken_is_a_mount_failure(place: Path, view: Path) -> None:
    place.mkdir(parents=True)

    with pytest.raises(MountFailedError, match="directory"):
        expose("symlink", view, place)


@needs_mounts
def test_not_even_root_can_write_where_a_view_is_bound(places: Places, place: Path, view: Path) -> None:
    with bound(places, place, view):
        for action in (
            lambda: (place / "config.json").write_bytes(b"mine"),
            lambda: (place / "new").write_bytes(b"mine"),
            (place / "config.json").unlink,
            lambda: (place / "config.json").chmod(0o777),
        ):
            with pytest.raises(OSError, match="Read-only file system") as caught:
                action()
            assert caught.value.errno == errno.EROFS
        flags = os.statvfs(place).f_flag
        assert flags & os.ST_NOSUID
        assert flags & os.ST_NODEV


@needs_mounts
def test_a_mount_that_a_crash_left_writable_is_made_anew(places: Places, place: Path, view: Path) -> None:
    place.mkdir(parents=True)
    subprocess.run(["mount", "--bind", view, place], check=True)

    with bound(places, place, view):
        assert os.statvfs(place).f_flag & os.ST_RDONLY
        assert len(mounts_below(place.parent)) == 1


@needs_mounts
def test_a_rebuilt_view_takes_the_place_of_the_old_one(places: Places, place: Path, view: Path) -> None:
    expose("bind", view, place)
    view.rename(view.with_name("old"))
    view.mkdir(parents=True)
    (view / "new").write_bytes(b"new")

    with bound(places, place, view):
        assert tree(place) == {"new": b"new"}


@needs_mounts
def test_a_mount_in_use_is_detached_and_that_is_said(places: Places, place: Path, view: Path) -> None:
    expose("bind", view, place)
    with (place / "config.json").open("rb") as job:
        note = conceal(place, places.mounts)

        assert note is not None
        assert "only detached" in note
        assert not place.exists()
        assert job.read() == b"{}"


@contextmanager
def other_namespace(propagation: str) -> Iterator[int]:
    """A process with mounts of its own, which get ours in this way: ``shared``, ``slave``, ``private``."""
    command = ["unshare", "--mount", "--propagation", propagation, "sh", "-c", "echo; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.stdin.close()


@needs_mounts
@pytest.mark.parametrize("is_old", [False, True], ids=["one-step", "older-kernel"])
@pytest.mark.parametrize("propagation", ["shared", "slave", "private"])
def test_who_gets_a_mount_by_propagation_gets_it_read_only_and_loses_it_with_ours(
    places: Places, place: Path, view: Path, monkeypatch: pytest.MonkeyPatch, propagation: str, is_old: bool
) -> None:
    if is_old:
        monkeypatch.setattr(binding, "attach_read_only", refusing(errno.ENOSYS))
    with mounted(places.root, "--bind", str(places.root)):
        subprocess.run(["mount", "--make-shared", places.root], check=True)
        with other_namespace(propagation) as pid, bound(places, place, view):
            seen = Path(f"/proc/{pid}/root{place}")
            if propagation == "private":
                assert list(seen.iterdir()) == []
            else:
                with pytest.raises(OSError, match="Read-only file system"):
                    (seen / "config.json").write_bytes(b"mine")
                flags = os.statvfs(seen).f_flag
                assert flags & os.ST_NOSUID
                assert flags & os.ST_NODEV
            assert tree(view) == FILES
            conceal(place, places.mounts)
            assert str(places.mounts).encode() not in Path(f"/proc/{pid}/mountinfo").read_bytes()
            assert list(places.mounts.iterdir()) == []
            assert mounts_below(places.root) == []


def refusing(number: int) -> Callable[..., NoReturn]:
    """A call that the kernel refuses."""

    def refuse(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return refuse


@needs_mounts
def test_on_an_older_kernel_nothing_stays_mounted_where_the_remount_is_refused(
    place: Path, view: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = syscalls.mount

    def refuse_remount(source: Path | None, target: Path, flags: int) -> None:
        if flags & syscalls.MS_REMOUNT:
            refusing(errno.EPERM)()
        real(source, target, flags)

    monkeypatch.setattr(binding, "attach_read_only", refusing(errno.ENOSYS))
    monkeypatch.setattr(binding, "mount", refuse_remount)
    with pytest.raises(MountFailedError, match="Operation not permitted"):
        expose("bind", view, place)

    assert mounts_below(place.parent) == []
    assert list(place.parent.iterdir()) == [place]


@needs_mounts
def test_what_a_killed_bind_left_mounted_goes_with_its_stage(places: Places, place: Path, view: Path) -> None:
    aside = place.with_name(".binding-1")
    aside.mkdir(parents=True)
    subprocess.run(["mount", "--bind", aside, aside], check=True)

    assert Views(WholeFiles(places), "bind").drop("stg_1", {"/app/model": None}) is None

    assert mounts_below(places.root) == []
    assert list(places.mounts.iterdir()) == []


def test_auto_is_bind_where_the_kernel_permits_it_and_symlink_elsewhere(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    for may, kind in ((True, "bind"), (False, "symlink")):
        monkeypatch.setattr(module, "can_bind", lambda _, may=may: may)
        assert choose("auto", places) == kind
    assert choose("none", places) == "none"


def test_whether_binding_is_permitted_is_tried_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in ("attach_read_only", "mount"):
        monkeypatch.setattr(binding, call, refusing(errno.EPERM))

    assert not binding.can_bind(tmp_path)
    assert list(tmp_path.iterdir()) == []
