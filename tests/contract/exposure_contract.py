"""What every way of exposing a view promises."""

from pathlib import Path

import pytest

from bdn.core.errors import MountFailedError
from node_agent.disk.places import Places
from node_agent.stage.view.exposure import Exposure
from tests.support.content.trees import tree

FILES = {"config.json": b"{}", "a b/\u00fc.txt": b"unicode"}


class ExposureContract:
    """Inherit, and give ``exposure`` and ``view_root``: where views of that kind stand."""

    @pytest.fixture
    def places(self, tmp_path: Path) -> Places:
        places = Places(tmp_path / "with space\\and backslash")
        places.make()
        return places

    @pytest.fixture
    def exposure(self, places: Places) -> Exposure:
        raise NotImplementedError

    @pytest.fixture
    def view_root(self, places: Places) -> Path:
        return places.views / "stg_1"

    @pytest.fixture
    def view(self, view_root: Path) -> Path:
        view = view_root / "app/model"
        for path, content in FILES.items():
            (view / path).parent.mkdir(parents=True, exist_ok=True)
            (view / path).write_bytes(content)
        return view

    @pytest.fixture
    def place(self, places: Places) -> Path:
        return places.mounts / "stg_1/app/model"

    def test_the_place_shows_the_view(self, exposure: Exposure, view: Path, place: Path) -> None:
        exposure.expose(view, place)
        try:
            assert tree(place) == FILES
        finally:
            exposure.conceal(place)

    def test_exposing_again_changes_nothing(self, exposure: Exposure, view: Path, place: Path) -> None:
        exposure.expose(view, place)
        exposure.expose(view, place)
        try:
            assert tree(place) == FILES
        finally:
            assert exposure.conceal(place) is None

    def test_the_view_survives_being_concealed(self, exposure: Exposure, view: Path, place: Path) -> None:
        exposure.expose(view, place)
        exposure.conceal(place)

        assert tree(view) == FILES

    def test_concealing_can_be_repeated_and_needs_no_exposing(
        self, exposure: Exposure, view: Path, place: Path, places: Places
    ) -> None:
        assert exposure.conceal(place) is None
        exposure.expose(view, place)
        assert exposure.conceal(place) is None
        assert exposure.conceal(place) is None
        if view != place:
            assert list(places.mounts.iterdir()) == []  # mount points and the folders above them are gone


class CheckingExposureContract(ExposureContract):
    """Those that notice whether there is a view; a link does not."""

    def test_a_view_that_is_not_there_cannot_be_exposed(self, exposure: Exposure, view_root: Path, place: Path) -> None:
        with pytest.raises(MountFailedError) as caught:
            exposure.expose(view_root / "absent", place)

        assert caught.value.path == str(place)
