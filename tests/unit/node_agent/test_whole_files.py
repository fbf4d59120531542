"""A whole file that others have touched is not handed on before it was read, and ours are told from theirs after a restart, too."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bdn.core.chunk import Digest
from node_agent.disk.whole_files import ChangedFilesError, WholeFiles, seen
from tests.support.agent.cache import cached
from tests.support.content.layouts import manifest_of

CONTENT = b"some bytes that are right"


class Site:
    """A cache of one file, and a folder for links to it."""

    def __init__(self, root: Path) -> None:
        self.places, self.manifest = cached(root / "cache", {"a": CONTENT})
        (self.content,) = self.manifest.contents
        self.own = self.places.file(self.content)
        self.links = root / "links"
        self.links.mkdir()
        self.files = WholeFiles(self.places)
        self.own.rename(root / "filled")
        self.files.appear(self.content, root / "filled")

    def link(self, name: str = "link") -> Path:
        self.files.link(self.content, str(self.links / name))
        return self.links / name

    def restarted(self) -> set[Digest]:
        """What is suspected by the next run, which is the one that counts from now on."""
        self.files = WholeFiles(self.places)
        return self.files.restore({self.content: seen(self.own.stat())}, [self.manifest])


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def write(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(CONTENT[::-1])


def write_and_hide(path: Path) -> None:
    before = path.stat()
    write(path)
    path.chmod(0o444)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def unlink(path: Path) -> None:
    path.unlink()


HARMLESS: list[Callable[[Path], object]] = [Path.touch, lambda path: path.chmod(0o600), unlink]
HARMFUL: list[Callable[[Path], object]] = [write, write_and_hide]


@pytest.mark.parametrize("touch", HARMFUL + HARMLESS)
@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
def test_a_file_that_somebody_touched_is_linked_only_after_it_was_found_right(
    site: Site, touch: Callable[[Path], object], restarts: bool
) -> None:
    link = site.link()
    site.files.save(site.manifest)
    touch(link)

    assert not restarts or site.restarted() == {site.content}
    assert site.files.changed(site.manifest.contents) == [site.content]
    with pytest.raises(ChangedFilesError):
        site.link("another")
    assert not (site.links / "another").exists()

    is_right = touch in HARMLESS
    assert site.files.verify(site.content, len(CONTENT)) is is_right
    assert (site.files.changed(site.manifest.contents) == []) is is_right
    if is_right:
        site.link("another")


def test_our_own_links_are_no_change_however_many_there_are(site: Site) -> None:
    descriptor = os.open(site.links, os.O_RDONLY)
    try:
        for number in range(3):
            site.link(str(number))
        for number in range(3):
            site.files.unlink(site.content, str(number), descriptor)
            assert site.files.changed(site.manifest.contents) == []
    finally:
        os.close(descriptor)
    site.files.save(site.manifest)
    assert site.restarted() == set()


def test_a_link_of_ours_does_not_hide_what_somebody_wrote_before_it(site: Site) -> None:
    descriptor = os.open(site.links, os.O_RDONLY)
    try:
        write_and_hide(site.link())
        site.files.unlink(site.content, "link", descriptor)
    finally:
        os.close(descriptor)

    assert site.files.changed(site.manifest.contents) == [site.content]


def test_what_an_earlier_version_left_is_believed_as_it_is_found(site: Site) -> None:
    assert site.restarted() == set()
    assert site.files.changed(site.manifest.contents) == []


@pytest.mark.parametrize("damage", [b"", b"bdnpins1", b"nonsense" * 3])
def test_damaged_notes_make_their_files_suspects(site: Site, damage: bytes) -> None:
    site.files.save(site.manifest)
    site.places.pins(site.manifest.digest).write_bytes(damage)

    assert site.restarted() == {site.content}


def test_one_manifest_that_knows_the_file_as_it_is_is_enough(site: Site) -> None:
    site.files.save(site.manifest)
    other = manifest_of([*site.manifest.files, *cached(site.places.root, {"b": b"other"})[1].files])
    site.places.pins(other.digest).parent.mkdir()
    site.link()
    site.files.save(other)

    files = WholeFiles(site.places)
    assert files.restore({site.content: seen(site.own.stat())}, [site.manifest, other]) == set()


def test_stages_of_one_manifest_note_its_files_at_once(site: Site) -> None:
    with ThreadPoolExecutor(8) as threads:
        for noted in [threads.submit(site.files.save, site.manifest) for _ in range(400)]:
            noted.result()
    assert site.restarted() == set()
