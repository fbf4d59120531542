"""Each way of exposing keeps the contract, and what is special about it."""

import errno
import os
import subprocess
from pathlib import Path

import pytest

from bdn.core.errors import MountFailedError
from bdn.disk import syscalls
from node_agent.disk.places import Places
from node_agent.stage.view import exposure as module
from node_agent.stage.view.exposure import (
    BindExposure,
    Exposure,
    NoExposure,
    SymlinkExposure,
    choose,
    is_mount_point,
    mounts_below,
)
from tests.contract.exposure_contract import FILES, CheckingExposureContract, ExposureContract
from tests.support.agent.mounts import needs_mounts
from tests.support.content.trees import tree


class TestNoExposure(CheckingExposureContract):
    @pytest.fixture
    def exposure(self, places: Places) -> Exposure:
        return NoExposure(places.mounts)

    @pytest.fixture
    def view_root(self, places: Places) -> Path:
        return places.mounts / "stg_1"


class TestSymlinkExposure(ExposureContract):
    @pytest.fixture
    def exposure(self, places: Places) -> Exposure:
        return SymlinkExposure(places.mounts)

    def test_a_link_to_something_else_is_replaced(self, exposure: Exposure, view: Path, place: Path) -> None:
        place.parent.mkdir(parents=True)
        place.symlink_to("/elsewhere")

        exposure.expose(view, place)

        assert tree(place) == FILES

    def test_a_place_that_is_taken_is_a_mount_failure(self, exposure: Exposure, view: Path, place: Path) -> None:
        place.mkdir(parents=True)

        with pytest.raises(MountFailedError, match="directory"):
            exposure.expose(view, place)
        with pytest.raises(MountFailedError):
            exposure.conceal(place)


@needs_mounts
class TestBindExposure(CheckingExposureContract):
    @pytest.fixture
    def exposure(self, places: Places) -> Exposure:
        return BindExposure(places.mounts)

    def test_not_even_root_can_write_there(self, exposure: Exposure, view: Path, place: Path) -> None:
        exposure.expose(view, place)
        try:
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
        finally:
            exposure.conceal(place)

    def test_a_mount_that_a_crash_left_writable_is_made_anew(self, exposure: Exposure, view: Path, place: Path) -> None:
        place.mkdir(parents=True)
        subprocess.run(["mount", "--bind", view, place], check=True)

        exposure.expose(view, place)
        try:
            assert os.statvfs(place).f_flag & os.ST_RDONLY
            assert len(mounts_below(place.parent)) == 1
        finally:
            exposure.conceal(place)

    def test_a_rebuilt_view_takes_the_place_of_the_old_one(
        self, exposure: Exposure, view: Path, place: Path, view_root: Path
    ) -> None:
        exposure.expose(view, place)
        view_root.rename(view_root.with_name("old"))
        view.mkdir(parents=True)
        (view / "new").write_bytes(b"new")

        exposure.expose(view, place)
        try:
            assert tree(place) == {"new": b"new"}
        finally:
            exposure.conceal(place)

    def test_a_mount_in_use_is_detached_and_that_is_said(self, exposure: Exposure, view: Path, place: Path) -> None:
        exposure.expose(view, place)
        with (place / "config.json").open("rb") as job:
            note = exposure.conceal(place)

            assert note is not None
            assert "only detached" in note
            assert not place.exists()
            assert job.read() == b"{}"

    def test_where_the_remount_is_refused_nothing_stays_mounted(
        self, exposure: Exposure, view: Path, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = syscalls.mount

        def refuse_remount(source: Path | None, target: Path, flags: int) -> None:
            if source is None:
                raise PermissionError(errno.EPERM, "Operation not permitted")
            real(source, target, flags)

        monkeypatch.setattr(module, "mount", refuse_remount)
        with pytest.raises(MountFailedError, match="Operation not permitted"):
            exposure.expose(view, place)

        assert not is_mount_point(place)


def test_auto_is_bind_where_the_kernel_permits_it_and_symlink_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places(tmp_path)
    places.make()
    for may, kind in ((True, "bind"), (False, "symlink")):
        monkeypatch.setattr(module, "can_bind", lambda _, may=may: may)
        assert choose("auto", places) == kind
    assert choose("none", places) == "none"


def test_whether_binding_is_permitted_is_tried_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(module, "mount", refuse)

    assert not module.can_bind(tmp_path)
    assert list(tmp_path.iterdir()) == []
